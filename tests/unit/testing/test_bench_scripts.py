"""Every script in bench/ runs as `python bench/NAME.py` where the package is installed and nothing else is on the path.

All in one process: what takes long is to import torch, diffusers and transformers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polymux
from polymux.config import stage_environment

ROOT = Path(polymux.__file__).parents[1]
HELP = """
import contextlib, io, runpy, sys
own = list(sys.path)
for script in sys.argv[1:]:
    sys.argv, said = [script, "--help"], io.StringIO()
    sys.path[:] = [script.rpartition("/")[0], *own]
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, script
    except ModuleNotFoundError as error:
        print(script.rpartition("/")[2], "lacks", error.name)
        continue
    print(script.rpartition("/")[2], "helps" if "usage: " in said.getvalue() else "ran")
"""


def test_each_says_what_it_can_do(tmp_path: Path) -> None:
    (tmp_path / "polymux").symlink_to(ROOT / "polymux")  # as installed: without what lies beside it
    scripts = [
        script for script in sorted((ROOT / "bench").glob("*.py"))
        if "__main__" in (text := script.read_text()) and "ArgumentParser" in text
    ]  # fmt: skip
    assert len(scripts) > 15
    command = [sys.executable, "-c", HELP, *map(str, scripts)]
    environment = stage_environment() | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout.splitlines()) == (0, [f"{script.name} helps" for script in scripts]), (
        done.stdout + done.stderr[-2000:]
    )
