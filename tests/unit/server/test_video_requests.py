"""What a request for a video may say and bring, and what is refused."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_video_omni import FakeVideoOmni
from PIL import Image
from video_scenarios import VIDEOS, create, run

from polymux.media.video import encode_video
from polymux.request import LoRARequest


def png(size: tuple[int, int] = (32, 32)) -> bytes:
    target = io.BytesIO()
    Image.new("RGB", size, "red").save(target, "PNG")
    return target.getvalue()


def mp4() -> bytes:
    target = io.BytesIO()
    encode_video(np.zeros((5, 32, 32, 3), np.uint8), 8, target)
    return target.getvalue()


def data_url(data: bytes) -> str:
    return "data:application/octet-stream;base64," + base64.b64encode(data).decode()


def test_media(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        plain = {"prompt": "a", "seconds": "1", "fps": "8", "size": "32x32", "extra_args": "{}", "seed": "5"}
        uploads = [
            ("input_reference", ("a.png", png(), "image/png")),
            ("reference_images", ("b.png", png(), "image/png")),
            ("reference_images[]", ("c.png", png(), "image/png")),
            ("video", ("d.mp4", mp4(), "video/mp4")),
            ("mask", ("e.mp4", mp4(), "video/mp4")),
        ]
        answer = await http.post(VIDEOS, data=plain, files=uploads)
        assert answer.status_code == 200, answer.text
        picture = data_url(png())
        body = {
            "prompt": "a",
            "input_reference": {"image_url": picture},
            "media": {"reference_images": [picture, {"image_url": picture}], "video": data_url(mp4()), "mask": picture},
        }
        answer = await http.post(VIDEOS, json=body)
        assert answer.status_code == 200, answer.text
        answer = await http.post(VIDEOS, data=plain | {"input_reference[image_url]": picture}, files={"mask": png()})
        assert answer.status_code == 200, answer.text
        form, posted, url = omni.requests
        assert {name: len(items) for name, items in form.media.items()} == {
            "image": 1, "reference_images": 2, "video": 1, "mask": 1,
        }  # fmt: skip
        assert form.media["video"] == posted.media["video"] == form.media["mask"] != posted.media["mask"]
        assert form.media["image"] == posted.media["image"] == url.media["image"]
        assert (form.params.num_frames, form.params.seed, form.params.fps) == (9, 5, None)

    run(scenario, tmp_path)


def test_adapters_in_both_kinds_of_bodies(tmp_path: Path) -> None:
    folder = tmp_path / "loras"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"")

    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        lora = {"path": "a.safetensors", "scale": 0.5}
        named = {"lora_name": "ink", "lora_path": "a.safetensors"}
        assert (await http.post("/v1/load_lora_adapter", json=named)).status_code == 200
        bodies: list[dict[str, Any]] = [
            {"json": {"prompt": "a", "lora": [lora]}},
            {"json": {"prompt": "a", "lora": {"name": "ink", "scale": 0.5}}},
            {"data": {"prompt": "a", "lora": json.dumps(lora)}, "files": {"input_reference": png()}},
        ]
        for body in bodies:
            answer = await http.post(VIDEOS, **body)
            assert answer.status_code == 200, answer.text
        wanted = (LoRARequest(path=str(folder / "a.safetensors"), scale=0.5),)
        assert [request.params.lora for request in omni.requests] == [wanted] * len(bodies)
        for route in (VIDEOS, f"{VIDEOS}/sync"):
            answer = await http.post(route, json={"prompt": "a", "lora": {"path": "../up"}})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora")

    run(scenario, tmp_path / "videos", allowed_lora_path=(str(folder),))


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing"),
    ({"seconds": "0"}, "seconds", "above 0"),
    ({"seconds": "abc"}, "seconds", "above 0"),
    ({"seconds": float("1e9")}, "seconds", "above 0"),
    ({"seconds": "nan"}, "seconds", "above 0"),
    ({"seconds": True}, "seconds", ""),
    *[({"seconds": value}, "seconds", "above 0") for value in ("1_0", "\u0664", " 1", "+1", "0x1")],
    ({"user": "x" * 257}, "user", "must have at most 256 characters"),
    ({"seconds": "500"}, "seconds", "--max-num-frames"),
    ({"seconds": "1", "num_frames": 9}, "num_frames", "seconds"),
    ({"num_frames": 8}, "num_frames", "5 or 9"),
    ({"fps": 0}, "fps", "0.01"),
    ({"fps": 51, "output_format": "gif"}, "fps", "50"),
    ({"size": "33x32"}, "size", "multiple of 16"),
    ({"size": "32"}, "size", "WIDTHxHEIGHT"),
    ({"seed": 2**64}, "seed", "less than"),
    ({"output_format": "mov"}, "output_format", "mp4"),
    ({"guidance_scale_2": 1.0}, "guidance_scale_2", "does not take"),
    ({"n": 2}, "n", "unknown"),
    ({"lora": {"path": "a"}}, "lora", "--allowed-lora-path"),
    ({"input_reference": "http://127.0.0.1/a"}, "input_reference", ""),
    ({"input_reference": "data:text/plain,hello"}, "input_reference", "not a whole picture"),
    ({"input_reference": {"file_id": "a"}}, "input_reference", "image_url"),
    ({"media": {"pose": "data:,"}}, "media.pose", "image, last_image"),
    ({"media": {"video": "data:,hello"}}, "media.video", "not a media file"),
    ({"media": {"last_image": ["data:,", "data:,"]}}, "media.last_image", "the model takes 1"),
    ({"media": {"image": "data:,"}, "input_reference": "data:,"}, "input_reference", "the same as media.image"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests(fields: dict[str, Any], param: str, message: str, tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        for route in (VIDEOS, f"{VIDEOS}/sync"):
            response = await http.post(route, content=json.dumps({"prompt": "a"} | fields))
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), error
            assert message in error["message"]
        assert omni.live == set()

    run(scenario, tmp_path)


def test_what_the_model_takes_is_told(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        can = (await http.get("/v1/models")).json()["data"][0]["capabilities"]
        assert (can["defaults"], can["fps"], can["frames_multiple"]) == (
            {"height": 32, "width": 48, "num_frames": 9},
            8,
            4,
        )
        assert can["media"]["reference_images"] == 3
        video = await create(http)
        assert (video["size"], video["num_frames"], video["seconds"]) == ("48x32", 9, "1.125")

    run(scenario, tmp_path)


def test_other_refusals(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        assert (await http.post(VIDEOS, json={"prompt": "a", "model": "x"})).status_code == 404
        assert (await http.post(VIDEOS, content=b"a", headers={"content-type": "text/plain"})).status_code == 415
        omni.status = "draining"
        assert (await http.post(VIDEOS, json={"prompt": "a"})).status_code == 503
        assert (await http.get(VIDEOS)).status_code == 200, "what there is can still be had"

    run(scenario, tmp_path)
