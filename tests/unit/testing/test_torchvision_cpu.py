"""The help that lets torchvision's CUDA-linked wheel import beside a CPU torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from polymux.testing import torchvision_cpu

needs_help = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None,
    reason="only beside a CPU build of torch",
)


def bare_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that has seen no .pth file, so no installed help either."""
    prelude = f"import sys; sys.path.append({sysconfig.get_paths()['purelib']!r}); "
    return subprocess.run([sys.executable, "-S", "-c", prelude + code], capture_output=True, text=True)


@needs_help
def test_installed_files_make_the_import_work(tmp_path: Path) -> None:
    assert bare_python("import torchvision").returncode != 0
    assert "installed" in torchvision_cpu.install(tmp_path)
    use = (
        f"import site; site.addsitedir({str(tmp_path)!r}); assert 'torch' not in sys.modules; "
        "from torchvision.transforms import v2; import torch; "
        "print(v2.Resize([4, 4])(torch.zeros(3, 8, 8)).shape)"
    )
    done = bare_python(use)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.Size([3, 4, 4])"


@needs_help
def test_installing_twice_changes_nothing(tmp_path: Path) -> None:
    torchvision_cpu.install(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(before) == 2
    assert torchvision_cpu.install(tmp_path).startswith("nothing done: already installed")
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_command_line_wants_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert torchvision_cpu.main([]) == 2
    assert "install" in capsys.readouterr().err
