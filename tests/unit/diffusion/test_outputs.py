"""From what pipelines return to media."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.pipeline_utils import AudioPipelineOutput, ImagePipelineOutput
from PIL import Image

from polymux.diffusion.outputs import media_of, sample_rate_of
from polymux.errors import GenerationError, NonFiniteOutputError
from polymux.media.wire import from_wire
from polymux.request import ArrayData, ImageData, Modality


def picture(size: tuple[int, int] = (4, 2), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, size, 7)


def array(*shape: int) -> np.ndarray[Any, Any]:
    return np.linspace(0, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def shapes(result: Any, modality: Modality = "image", as_pictures: bool = True) -> list[Any]:
    made = []
    for medium in media_of(result, modality, as_pictures):
        if isinstance(medium, ImageData):
            made.append((medium.mode, medium.width, medium.height))
        else:
            assert isinstance(medium, ArrayData)
            made.append((medium.dtype, *medium.shape))
    return made


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
    (medium,) = media_of(SimpleNamespace(frames=np.array([[[[[-0.5, 0.5, 1.5]]]]])), "video", True)
    assert np.asarray(from_wire(medium)).ravel().tolist() == [0, 128, 255]


def test_a_video_may_have_sound() -> None:
    both = SimpleNamespace(frames=array(1, 5, 2, 4, 3), audio=torch.zeros(1, 2, 100))
    assert shapes(both, "video") == [("uint8", 5, 2, 4, 3), ("float32", 2, 100)]
    assert shapes({"videos": array(1, 5, 2, 4, 3), "audio": None}, "video") == [("uint8", 5, 2, 4, 3)]


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
            media_of(result, modality, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("result", [None, {}, (), SimpleNamespace(images=None), {"videos": 3}, "text"])
def test_no_output_is_an_error(result: Any) -> None:
    with pytest.raises(GenerationError, match="returned no image"):
        media_of(result, "image", True)


def test_the_rate_of_the_sound() -> None:
    def pipeline(**components: Any) -> Any:
        return SimpleNamespace(components={name: SimpleNamespace(config=config) for name, config in components.items()})

    vae = SimpleNamespace(sampling_rate=44100)
    assert sample_rate_of(pipeline(vae=vae)) == 44100
    assert sample_rate_of(pipeline(vae=vae, vocoder=SimpleNamespace(output_sampling_rate=24000))) == 24000
    assert sample_rate_of(pipeline(vae=SimpleNamespace(sample_rate=None))) is None
    assert sample_rate_of(SimpleNamespace(components={"vae": None})) is None
