"""The loader: every kind of source through one door, and errors that tell no more than the client knows."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_server import LOOPBACK, FileServer, running
from PIL import Image

from polymux.errors import ConfigError, InvalidRequestError
from polymux.media.source import MediaLoader
from polymux.server_config import MediaConfig


def png(width: int = 6, height: int = 4, mode: str = "RGB") -> bytes:
    target = io.BytesIO()
    Image.effect_noise((width, height), 90).convert(mode).save(target, "PNG")
    return target.getvalue()


PICTURE = png()
DATA_URL = "data:image/png;base64," + base64.b64encode(PICTURE).decode()


@pytest.fixture(scope="module")
def server() -> Iterator[FileServer]:
    with running(FileServer()) as started:
        started.file("/a.png", PICTURE)
        yield started


def image(source: str | bytes, **config: Any) -> Image.Image:
    async def go() -> Image.Image:
        loader = MediaLoader(MediaConfig(**config))
        try:
            return await loader.image(source, param="image[0]")
        finally:
            await loader.aclose()

    return asyncio.run(go())


def refused(source: str | bytes, **config: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        image(source, **config)
    assert caught.value.param == "image[0]"
    assert caught.value.message.startswith("image[0]: ")
    return caught.value.message


def test_every_kind_of_source_gives_the_same_picture(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    local = {"allowed_local_media_path": str(tmp_path)}
    expected = np.asarray(Image.open(io.BytesIO(PICTURE)))
    for source in (PICTURE, DATA_URL, DATA_URL.replace("data:", "DATA:"), "a.png", (tmp_path / "a.png").as_uri()):
        assert np.array_equal(np.asarray(image(source, **local)), expected)
    assert np.array_equal(np.asarray(image(server.url("/a.png"), allowed_media_networks=LOOPBACK)), expected)


def test_by_default_nothing_local_and_nothing_private(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    for source in (f"{tmp_path}/a.png", f"file://{tmp_path}/a.png", "a.png", "", base64.b64encode(PICTURE).decode()):
        assert "must be a data: URL or an http(s) URL" in refused(source)
    before = len(server.seen)
    assert "not public" in refused(server.url("/a.png"))
    assert len(server.seen) == before


def test_files_are_named_like_schemes(tmp_path: Path) -> None:
    for name in ("data", "http", "https"):
        (tmp_path / name).write_bytes(PICTURE)
        assert image(name, allowed_local_media_path=str(tmp_path)).size == (6, 4)


def test_bytes_and_pixels_are_limited_for_every_kind(server: FileServer, tmp_path: Path) -> None:
    large = png(100, 100)
    (tmp_path / "a.png").write_bytes(large)
    server.file("/large.png", large)
    local = {"allowed_local_media_path": str(tmp_path), "allowed_media_networks": LOOPBACK}
    data_url = "data:;base64," + base64.b64encode(large).decode()
    for source in (large, data_url, "a.png", server.url("/large.png")):
        assert "more than 1024 bytes" in refused(source, max_media_bytes=1024, **local)
        assert "100x100 has 10000 pixels: allowed are 9999" in refused(source, max_input_image_size=9999, **local)
        assert image(source, max_media_bytes=len(large), max_input_image_size=10_000, **local).size == (100, 100)


def test_fetch_takes_the_smaller_limit(tmp_path: Path) -> None:
    loader = MediaLoader(MediaConfig(max_media_bytes=2000))

    def fetch(size: int, max_bytes: int) -> bytes:
        return asyncio.run(loader.fetch("data:," + "x" * size, param="video", max_bytes=max_bytes))

    assert len(fetch(2000, 3000)) == 2000
    for size, max_bytes in ((2001, 3000), (11, 10)):
        with pytest.raises(InvalidRequestError, match=f"more than {min(2000, max_bytes)} bytes"):
            fetch(size, max_bytes)


@pytest.mark.parametrize("data", [b"", b"text", PICTURE[: len(PICTURE) // 2], b"<svg/>"])
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    for source in (data, "data:image/png;base64," + base64.b64encode(data).decode()):
        assert "not a whole picture" in refused(source)


def test_a_mode_without_meaning_is_refused_with_the_field() -> None:
    target = io.BytesIO()
    Image.new("F", (4, 4), 0.5).save(target, "TIFF")
    assert "mode F" in refused(target.getvalue())


def test_of_an_animation_the_first_frame_counts() -> None:
    target = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(target, "GIF", save_all=True, append_images=frames[1:])
    assert image(target.getvalue()).convert("RGB").getpixel((0, 0)) == (255, 0, 0)


def test_a_folder_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed_local_media_path"):
        MediaLoader(MediaConfig(allowed_local_media_path=str(tmp_path / "none")))


def test_a_network_that_is_none_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match="allowed_media_networks"):
        MediaConfig(allowed_media_networks=("10.0.0.1/8",))


def test_nothing_of_the_media_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    image(DATA_URL)
    refused("data:image/png;base64,SECRET")
    assert "SECRET" not in caplog.text and DATA_URL[-20:] not in caplog.text
