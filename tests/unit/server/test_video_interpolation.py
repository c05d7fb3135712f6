"""Frames between frames over HTTP: what is asked for reaches the model, and what comes out is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
from fake_video_omni import FakeVideoOmni
from video_scenarios import VIDEOS, create, decoded, ended, run


def test_frames_between_frames(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        assert omni.capabilities is not None
        omni.capabilities = msgspec.structs.replace(omni.capabilities, frame_interpolation=True)
        asked = {"enable_frame_interpolation": True, "frame_interpolation_exp": 2, "frame_interpolation_scale": 0.5}
        video = await create(http, **asked)
        assert (video["num_frames"], video["fps"]) == (33, 32)
        form = {name: (None, json.dumps(value)) for name, value in asked.items()}
        sync = await http.post(f"{VIDEOS}/sync", files=form | {"prompt": (None, "a")})
        assert (sync.headers["x-num-frames"], sync.headers["x-fps"]) == ("33", "32")
        for request in omni.requests:
            params = request.params
            assert {name: getattr(params, name) for name in asked} == asked
            assert params.fps is None, "the model's own"
        frames, fps, _ = decoded((await http.get(f"{VIDEOS}/{(await ended(http, video))['id']}/content")).content)
        assert (len(frames), fps) == (33, 32)
        seconds = await create(http, seconds="2", enable_frame_interpolation=True)
        assert (seconds["num_frames"], seconds["fps"]) == (33, 16), "17 frames, 8 per second, and 16 between"

    run(scenario, tmp_path)


def test_frames_between_frames_are_refused(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        async def refused(**fields: Any) -> tuple[str, str]:
            response = await http.post(VIDEOS, json={"prompt": "a"} | fields)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            return error["param"], error["message"]

        param, message = await refused(enable_frame_interpolation=True)
        assert param == "enable_frame_interpolation" and "--frame-interpolation-model-path" in message
        assert omni.capabilities is not None
        omni.capabilities = msgspec.structs.replace(omni.capabilities, frame_interpolation=True)
        on = {"enable_frame_interpolation": True}
        for name, value in (("exp", 0), ("exp", 5), ("exp", 1.5), ("scale", 0), ("scale", 3)):
            assert (await refused(**on, **{f"frame_interpolation_{name}": value}))[0] == f"frame_interpolation_{name}"
        assert (await refused(frame_interpolation_exp=2))[0] == "frame_interpolation_exp"
        too_fast = on | {"output_format": "gif", "fps": 30}
        assert (await refused(**too_fast))[0] == "frame_interpolation_exp"
        assert (await refused(**on, frame_interpolation_model_path="x"))[0] == "frame_interpolation_model_path"
        assert not omni.requests

    run(scenario, tmp_path)
