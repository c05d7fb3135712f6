"""What Python callers may pass, and what becomes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from polymux.errors import InvalidRequestError
from polymux.prompts import request_of
from polymux.request import ArrayData, ImageData, OmniDiffusionSamplingParams, Request


def media(**given: Any) -> Request:
    return request_of({"prompt": "a", "multi_modal_data": given}, None, "r")


def test_a_text_and_a_dict() -> None:
    assert request_of("a", None, "r") == request_of({"prompt": "a"}, None, "r") == Request(request_id="r", prompt="a")


def test_the_prompts_own_negative_prompt_wins() -> None:
    params = OmniDiffusionSamplingParams(negative_prompt="general")
    assert request_of("a", params, "r").negative_prompt == "general"
    assert request_of({"prompt": "a", "negative_prompt": ""}, params, "r").negative_prompt == ""


def test_pictures_in_every_form() -> None:
    pixels = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    request = media(image=[Image.fromarray(pixels), pixels], mask_image=pixels[..., 0])
    first, second = request.media["image"]
    assert first == second == ImageData("RGB", 3, 2, pixels.tobytes())
    assert request.media["mask_image"] == [ImageData("L", 3, 2, np.ascontiguousarray(pixels[..., 0]).tobytes())]


def test_video_as_array_and_as_pictures() -> None:
    frames = np.arange(2 * 4 * 3 * 3, dtype=np.uint8).reshape(2, 4, 3, 3)
    expected = [ArrayData("uint8", frames.shape, frames.tobytes())]
    assert media(video=frames).media["video"] == expected
    assert media(video=[Image.fromarray(f) for f in frames]).media["video"] == expected


def test_sound_with_its_rate() -> None:
    sound = np.zeros(5, np.float32)
    assert media(audio=(sound, 16000)).media["audio"] == [ArrayData("float32", (1, 5), bytes(20), 16000)]
    assert media(audio=[(np.zeros((2, 5), np.float32), 8000)]).media["audio"][0] == ArrayData(
        "float32", (2, 5), bytes(40), 8000
    )


def test_numbers_of_numpy_become_plain() -> None:
    params = OmniDiffusionSamplingParams(
        height=np.int64(64), guidance_scale=np.float32(2.0), sigmas=np.array([1.0, 0.5]), timesteps=[np.int64(3), 1]
    )
    got = request_of("a", params, "r").params
    assert (got.height, got.guidance_scale, got.sigmas, got.timesteps) == (64, 2.0, (1.0, 0.5), (3, 1))
    assert type(got.height) is int
    assert type(got.sigmas[0]) is float


class CpuGenerator:
    device = "cpu"

    def get_state(self) -> Any:
        return self

    def numpy(self) -> np.ndarray:
        return np.array([1, 2, 3], np.uint8)


class CudaGenerator(CpuGenerator):
    device = "cuda:0"


def test_a_generators_state_travels() -> None:
    request = request_of("a", OmniDiffusionSamplingParams(generator=CpuGenerator()), "r")
    assert request.generator_state == b"\1\2\3"
    assert request.params.generator is None


def test_a_real_generators_state_travels() -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(7)
    state = request_of("a", OmniDiffusionSamplingParams(generator=generator), "r").generator_state
    assert state is not None
    again = torch.Generator()
    again.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    assert torch.equal(torch.rand(3, generator=again), torch.rand(3, generator=generator))


BAD: list[tuple[str, Any, Any]] = [
    ("prompt", 3, None),
    ("prompt", None, None),
    ("prompt", {"promt": "a"}, None),
    ("prompt", {1: "a"}, None),
    ("sampling_params", "a", {"height": 64}),
    ("sampling_params", "a", "x"),
    ("multi_modal_data", {"multi_modal_data": [1]}, None),
    ("multi_modal_data", {"multi_modal_data": {1: Image.new("L", (1, 1))}}, None),
    ("image", {"multi_modal_data": {"image": "cat.png"}}, None),
    ("image", {"multi_modal_data": {"image": None}}, None),
    ("image", {"multi_modal_data": {"image": [b"png"]}}, None),
    ("image", {"multi_modal_data": {"image": np.zeros((2, 2, 5), np.uint8)}}, None),
    ("image", {"multi_modal_data": {"image": Image.new("F", (1, 1))}}, None),
    ("audio", {"multi_modal_data": {"audio": np.zeros(3, np.complex64)}}, None),
    ("audio", {"multi_modal_data": {"audio": (np.zeros(3), 0)}}, None),
    ("audio", {"multi_modal_data": {"audio": (np.zeros(3), "16000")}}, None),
    ("video", {"multi_modal_data": {"video": [Image.new("L", (1, 1)), Image.new("L", (2, 1))]}}, None),
    ("generator", "a", OmniDiffusionSamplingParams(generator=3)),
    ("generator", "a", OmniDiffusionSamplingParams(generator=[CpuGenerator()])),
    ("generator", "a", OmniDiffusionSamplingParams(generator=CudaGenerator())),
]


@pytest.mark.parametrize(("param", "prompt", "params"), BAD)  # ids without an address in them: workers must agree
def test_what_is_not_shaped_like_a_prompt_is_refused(param: str, prompt: Any, params: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_of(prompt, params, "r")
    assert caught.value.param == param
