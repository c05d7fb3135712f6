"""Files of one folder: no way out of it, by whatever path, link or race."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from polymux.errors import ConfigError, InvalidRequestError
from polymux.media.local import LocalSource


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "allowed folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.png").write_bytes(b"a")
    (folder / "inner" / "b.png").write_bytes(b"b")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "allowed folder2").mkdir()
    (tmp_path / "allowed folder2" / "secret").write_bytes(b"secret")
    return folder


def read(root: Path, source: str, max_bytes: int = 100) -> bytes:
    return LocalSource(str(root)).read(source, param="image", max_bytes=max_bytes)


def test_file_urls_and_paths(root: Path) -> None:
    for source in (f"{root}/a.png", (root / "a.png").as_uri(), f"file://localhost{root}/a.png", "a.png", "./a.png"):
        assert read(root, source) == b"a"
    assert read(root, f"{root}/inner//b.png") == read(root, "inner/b.png") == b"b"


def test_the_root_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    source = LocalSource(str(tmp_path / "link"))
    for path in (f"{tmp_path}/link/a.png", f"{root}/a.png"):
        assert source.read(path, param="image", max_bytes=100) == b"a"


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "../secret", "inner/../../secret", "inner/../a.png", "/", "/etc/passwd", "{root}", "{root}/..",
     "{root}/../secret", "{root}2/secret", "{root}/inner", "{root}/none", "a.png/x", "a.png\0", "\0",
     "file:///etc/passwd", "file:{root}/../secret", "file://host{root}/a.png", "file://{root}/%2e%2e/secret",
     "file://{root}/a.png?x", "file:a.png", "file://[", "http:/a.png", "inner\\..\\..\\secret", "x" * 5000],
)  # fmt: skip
def test_what_is_not_a_file_in_the_folder_is_refused(root: Path, path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(root, path.format(root=root))
    assert caught.value.param == "image"
    assert str(root) not in caught.value.message


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    (root / "file").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path)
    (root / "inside").symlink_to(root / "a.png")
    for path in ("file", "folder/secret", "folder/allowed folder/a.png", "inside"):
        with pytest.raises(InvalidRequestError, match="no such file"):
            read(root, path)


def test_a_folder_that_becomes_a_link_leads_nowhere(root: Path, tmp_path: Path) -> None:
    """However it is timed: while somebody exchanges folder and link, the secret never comes out."""
    inner, moved, done = root / "inner", root / "moved", threading.Event()
    (inner / "secret").write_bytes(b"harmless")

    def exchange() -> None:
        while not done.is_set():
            inner.rename(moved)
            inner.symlink_to(tmp_path)
            inner.unlink()
            moved.rename(inner)

    thread = threading.Thread(target=exchange)
    thread.start()
    seen = set()
    for _ in range(1000):
        try:
            seen.add(read(root, "inner/secret"))
        except InvalidRequestError:
            seen.add(b"refused")
    done.set()
    thread.join()
    assert b"harmless" in seen | {read(root, "inner/secret")}
    assert b"secret" not in seen


def test_only_regular_files(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(InvalidRequestError, match="no such file"):
        read(root, "pipe")


def test_the_limit_is_exact(root: Path) -> None:
    (root / "ten").write_bytes(b"x" * 10)
    assert read(root, "ten", 10) == b"x" * 10
    with pytest.raises(InvalidRequestError, match="more than 9 bytes"):
        read(root, "ten", 9)


@pytest.mark.parametrize("name", ["none", "a.png"])
def test_the_root_must_be_a_folder(root: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="must be a folder"):
        LocalSource(str(root / name))
