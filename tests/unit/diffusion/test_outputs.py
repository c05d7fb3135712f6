"""From what pipelines return to media."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.pipeline_utils import AudioPipelineOutput, ImagePipelineOutput
from PIL import Image

from polymux.diffusion.host_copy import HostCopy
from polymux.diffusion.outputs import media_of, raw_output
from polymux.errors import GenerationError, NonFiniteOutputError
from polymux.media.wire import from_wire
from polymux.request import ArrayData, ImageData, Media, Modality


def picture(size: tuple[int, int] = (4, 2), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, size, 7)


def array(*shape: int) -> np.ndarray[Any, Any]:
    return np.linspace(0, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def made(result: Any, modality: Modality = "image", as_pictures: bool = True, chunk_bytes: int = 2**20) -> list[Media]:
    """The media of an output as the engine makes them: pictures at once, others through `HostCopy`."""
    raw = raw_output(result, modality, as_pictures, tensors=True)
    if modality == "image":
        return media_of(raw)
    return HostCopy(torch.device("cpu"), chunk_bytes).run(raw, None, lambda *_: pytest.fail("too large for a message"))


def chunks(result: Any, chunk_bytes: int, as_pictures: bool = True) -> list[tuple[int, tuple[int, ...], int, Any]]:
    """The same where the media are too large for one message."""
    got: list[tuple[int, tuple[int, ...], int, Any]] = []
    raw = raw_output(result, "video", as_pictures, tensors=True)
    copy = HostCopy(torch.device("cpu"), chunk_bytes)
    rest = copy.run(raw, None, lambda i, shape, start, rows: got.append((i, shape, start, from_wire(rows))))
    assert rest == []
    return got


def shapes(result: Any, modality: Modality = "image", as_pictures: bool = True) -> list[Any]:
    found: list[Any] = []
    for medium in made(result, modality, as_pictures):
        if isinstance(medium, ImageData):
            found.append((medium.mode, medium.width, medium.height))
        else:
            assert isinstance(medium, ArrayData)
            found.append((medium.dtype, *medium.shape))
    return found


def test_pictures() -> None:
    assert shapes(ImagePipelineOutput(images=[picture()])) == [("RGB", 4, 2)]
    assert shapes(ImagePipelineOutput(images=[picture(mode="RGBA")])) == [("RGBA", 4, 2)]
    assert shapes({"images": [picture()]}) == [("RGB", 4, 2)], "modular pipelines return plain dictionaries"
    assert shapes(([picture()], False)) == [("RGB", 4, 2)], "or the pipeline was not asked for an object"


def test_a_layered_picture_has_several_media() -> None:
    layers = [picture(mode="RGBA"), picture(mode="RGBA")]
    assert shapes(ImagePipelineOutput(images=[layers])) == [("RGBA", 4, 2)] * 2


def test_arrays_and_latents_lose_their_batch_axis() -> None:
    assert shapes(ImagePipelineOutput(images=array(1, 2, 4, 3)), as_pictures=False) == [("float32", 2, 4, 3)]
    latents = torch.ones(1, 16, 8, dtype=torch.bfloat16)
    assert shapes(ImagePipelineOutput(images=latents), as_pictures=False) == [("float32", 16, 8)]


def test_frames_become_bytes_where_pictures_are_wanted() -> None:
    frames = SimpleNamespace(frames=array(1, 5, 2, 4, 3))
    assert shapes(frames, "video") == [("uint8", 5, 2, 4, 3)]
    assert shapes(frames, "video", as_pictures=False) == [("float32", 5, 2, 4, 3)]
    (medium,) = made(SimpleNamespace(frames=np.array([[[[[-0.5, 0.5, 1.5]]]]])), "video")
    assert np.asarray(from_wire(medium)).ravel().tolist() == [0, 128, 255]


def test_a_video_may_have_sound() -> None:
    both = SimpleNamespace(frames=array(1, 5, 2, 4, 3), audio=torch.zeros(1, 2, 100))
    assert shapes(both, "video") == [("uint8", 5, 2, 4, 3), ("float32", 2, 100)]
    assert shapes({"videos": array(1, 5, 2, 4, 3), "audio": None}, "video") == [("uint8", 5, 2, 4, 3)]


def test_frames_on_the_device_become_the_same_bytes() -> None:
    """The conversion of tensors, before the copy, rounds as that of arrays does."""
    floats = np.random.default_rng(0).random((1, 9, 8, 6, 3), dtype=np.float32)
    floats[0, 0, 0, 0] = (0.5 / 255, 1.5 / 255, 254.5 / 255)  # halves, which round to even
    tensor = torch.from_numpy(floats).permute(0, 1, 4, 2, 3).contiguous()
    (of_array,) = made(SimpleNamespace(frames=floats), "video")
    (of_tensor,) = made(SimpleNamespace(frames=tensor), "video")
    assert of_array == of_tensor
    parts = chunks(SimpleNamespace(frames=tensor), chunk_bytes=2 * 8 * 6 * 3)
    assert [(i, shape, start) for i, shape, start, _ in parts] == [(0, (9, 8, 6, 3), n) for n in range(0, 9, 2)]
    assert np.array_equal(np.concatenate([rows for *_, rows in parts]), from_wire(of_tensor))
    bytes_already = SimpleNamespace(frames=torch.from_numpy(np.asarray(from_wire(of_tensor)))[None])
    raw = raw_output(bytes_already, "video", True, tensors=False)
    assert HostCopy(torch.device("cpu"), 2**20).run(raw, None, lambda *_: None) == [of_tensor]


def test_sound_comes_before_frames_in_chunks() -> None:
    both = SimpleNamespace(frames=array(1, 5, 2, 4, 3), audio=torch.zeros(1, 2, 10, dtype=torch.bfloat16))
    parts = chunks(both, chunk_bytes=1)
    assert [(i, shape, start) for i, shape, start, _ in parts] == [
        *((1, (2, 10), n) for n in range(2)),
        *((0, (5, 2, 4, 3), n) for n in range(5)),
    ]
    assert [part.dtype for *_, part in parts] == [np.float32] * 2 + [np.uint8] * 5
    floats = chunks(both, chunk_bytes=200, as_pictures=False)
    assert [(i, start) for i, _, start, _ in floats] == [(1, 0), (0, 0), (0, 2), (0, 4)]
    assert np.array_equal(np.concatenate([rows for i, *_, rows in floats if i == 0]), array(5, 2, 4, 3))


def test_frames_may_come_as_pictures() -> None:
    assert shapes(SimpleNamespace(frames=[[picture(), picture()]]), "video") == [("uint8", 2, 2, 4, 3)]


def test_sound() -> None:
    assert shapes(AudioPipelineOutput(audios=torch.zeros(1, 2, 100)), "audio") == [("float32", 2, 100)]
    assert shapes(AudioPipelineOutput(audios=array(1, 100)), "audio") == [("float32", 100)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_no_output(bad: float) -> None:
    pixels = array(1, 2, 4, 3)
    pixels[0, 0, 0, 0] = bad
    for result, modality in (
        (ImagePipelineOutput(images=pixels), "image"),
        (SimpleNamespace(frames=pixels[None]), "video"),
        (AudioPipelineOutput(audios=torch.from_numpy(pixels)), "audio"),
        (SimpleNamespace(frames=array(1, 1, 2, 4, 3), audio=torch.tensor([[[bad]]])), "video"),
    ):
        with pytest.raises(NonFiniteOutputError):
            made(result, modality)  # type: ignore[arg-type]


@pytest.mark.parametrize("result", [None, {}, (), SimpleNamespace(images=None), {"videos": 3}, "text"])
def test_no_output_is_an_error(result: Any) -> None:
    with pytest.raises(GenerationError, match="returned no image"):
        raw_output(result, "image", True)
