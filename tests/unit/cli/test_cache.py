"""`polymux cache`: what it prints, what it removes, and its exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polymux.cli.main import main
from polymux.config import runtime_cache_dir, stage_environment
from polymux.memory.runtime_cache import CacheSettings, Content, Identity, RuntimeCache
from polymux.memory.runtime_cache.layout import BlockSpec, FileLayout, TensorSpec
from polymux.memory.runtime_cache.manifest import WEIGHTS

LAYOUT = FileLayout.of(
    BlockSpec(name, (TensorSpec(f"{name}.weight", "BF16", (500,)),)) for name in ("rest", "blocks.0")
)


def write(root: Path, dtype: str) -> str:
    identity = Identity(model_class="m.Model", sources=(), libraries=(), blocks=("blocks.0",), dtype=dtype)
    content = Content(identity, "some/model transformer", LAYOUT, lambda name: memoryview(bytes(range(250)) * 4))
    with RuntimeCache(CacheSettings(root=root, threads=1)).turn(identity) as turn:
        turn.publish(content)
    return identity.digest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def run(root: Path, *words: str) -> int:
    return main(["cache", *words, "--dlo-runtime-cache-dir", str(root)])


def test_ls_shows_each_entry(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digests = [write(root, "bfloat16"), write(root, "float16")]
    assert run(root, "ls") == 0
    out = capsys.readouterr().out
    assert all(digest[:12] in out for digest in digests)
    assert "some/model transformer, bfloat16" in out
    assert "2 entries, 385." in out
    assert str(root) in out


def test_ls_of_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, "ls") == 0
    assert "0 entries, 0 B" in capsys.readouterr().out


def test_verify_names_the_damaged_block_and_fails(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = write(root, "bfloat16"), write(root, "float16")
    file = root / bad / WEIGHTS
    file.chmod(0o644)
    with file.open("r+b") as stream:
        stream.seek(LAYOUT.placed[1].offset + 7)
        stream.write(b"x")
    assert run(root, "verify") == 1
    out = capsys.readouterr().out
    assert f"{good[:12]}  ok" in out
    assert f"{bad[:12]}  damaged: the bytes of 'blocks.0' are wrong" in out
    assert "1 of 2 entries are whole" in out
    assert run(root, "verify", good[:12]) == 0


def test_verify_does_not_count_as_use(root: Path) -> None:
    manifest = root / write(root, "bfloat16") / "manifest.json"
    os.utime(manifest, (1000, 1000))
    assert run(root, "verify") == 0
    assert manifest.stat().st_mtime == 1000


def test_verify_of_a_truncated_entry_fails(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(root / write(root, "bfloat16") / WEIGHTS, 1000)
    assert run(root, "verify") == 1
    assert "has 1000 bytes, its manifest says" in capsys.readouterr().out


def test_rm_removes_what_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone, stays = write(root, "bfloat16"), write(root, "float16")
    assert run(root, "rm", gone[:12]) == 0
    assert f"{gone[:12]}  removed" in capsys.readouterr().out
    assert [path.name for path in root.iterdir() if path.is_dir()] == [stays]


def test_rm_all_removes_everything_of_the_cache_and_nothing_else(root: Path) -> None:
    digest = write(root, "bfloat16")
    (root / f".new-{digest}-0123456789abcdef").mkdir()
    (root / "notes.txt").write_text("mine")
    assert run(root, "rm", "--all") == 0
    assert os.listdir(root) == ["notes.txt"]


def test_rm_leaves_what_is_in_use(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = write(root, "bfloat16")
    entry = RuntimeCache(CacheSettings(root=root)).store.open(digest)
    assert entry is not None
    with entry:
        assert run(root, "ls") == 0
        assert " yes " in capsys.readouterr().out
        assert run(root, "rm", digest) == 1
        assert "in use" in capsys.readouterr().out
    assert run(root, "rm", digest) == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["rm"], "rm takes the names of entries, or --all"),
        (["rm", "--all", "abc"], "rm takes the names of entries, or --all"),
        (["rm", "zzz"], "no entry begins with 'zzz'"),
        (["ls", "abc"], "ls takes no entries"),
        (["verify", "--all"], "--all goes with rm"),
    ],
)
def test_impossible_command_lines(
    root: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert run(root, *words) == 2
    assert reason in capsys.readouterr().err


def test_an_ambiguous_name_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, "bfloat16"), write(root, "float16")
    assert run(root, "rm", "") == 2
    assert "2 entries begin with" in capsys.readouterr().err


def test_the_default_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert runtime_cache_dir() == tmp_path / "polymux" / "runtime"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runtime_cache_dir() == tmp_path / ".cache" / "polymux" / "runtime"
    assert runtime_cache_dir("~/elsewhere") == tmp_path / "elsewhere"


def test_it_imports_no_torch(root: Path) -> None:
    digest = write(root, "bfloat16")
    code = (
        "import sys; from polymux.cli.main import main; "
        f"main(['cache', 'ls', '--dlo-runtime-cache-dir', {str(root)!r}]); "
        f"main(['cache', 'verify', {digest!r}, '--dlo-runtime-cache-dir', {str(root)!r}]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=stage_environment()).returncode == 0
