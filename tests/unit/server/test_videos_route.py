"""Video jobs over HTTP, with a generator that does what a test says."""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import json
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import av
import httpx
import msgspec
import numpy as np
import pytest
from fake_omni import FakeOmni, client
from fake_video_omni import FakeVideoOmni, serving
from PIL import Image

from polymux.errors import OutOfMemoryError
from polymux.media.video import VideoWriter, encode_video
from polymux.server.video_store import VideoStore

VIDEOS = "/v1/videos"
Scenario = Callable[[httpx.AsyncClient, FakeVideoOmni], Awaitable[None]]


def run(scenario: Scenario, folder: Path, omni: FakeVideoOmni | None = None, **server_args: Any) -> None:
    async def all_of_it() -> None:
        used = omni or FakeVideoOmni()
        async with serving(used, folder, **server_args) as http:
            await scenario(http, used)

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


async def create(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post(VIDEOS, json={"prompt": "a"} | fields)
    assert response.status_code == 200, response.text
    video: dict[str, Any] = response.json()
    return video


async def get(http: httpx.AsyncClient, video: dict[str, Any]) -> dict[str, Any]:
    response = await http.get(f"{VIDEOS}/{video['id']}")
    found: dict[str, Any] = response.json()
    return found


async def ended(http: httpx.AsyncClient, video: dict[str, Any]) -> dict[str, Any]:
    seen = [video]
    while seen[-1]["status"] not in ("completed", "failed"):
        await asyncio.sleep(0.005)
        seen.append(await get(http, video))
    progress = [state["progress"] for state in seen]
    assert progress == sorted(progress)
    return seen[-1]


async def reaches(omni: FakeVideoOmni, video: dict[str, Any], gate: str) -> None:
    while omni.at.get(video["id"]) != gate:
        await asyncio.sleep(0.005)


def files(folder: Path) -> set[str]:
    return {path.name for part in ("files", "partial") for path in (folder / part).iterdir()}


def decoded(content: bytes) -> tuple[list[np.ndarray[Any, Any]], float, int]:
    """Frames, frames per second, and samples of sound."""
    with av.open(io.BytesIO(content)) as container:
        rate = container.streams.video[0].average_rate
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    samples = 0
    with av.open(io.BytesIO(content)) as container:
        if container.streams.audio:
            samples = sum(frame.samples for frame in container.decode(audio=0))
    return frames, float(rate or 0), samples


def test_the_life_of_a_job(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        for gate in omni.gates.values():
            gate.clear()
        before = int(time.time())
        video = await create(http, seconds="1", size="32x32", fps=4, seed=3)
        told = {"status": "queued", "progress": 0, "size": "32x32", "num_frames": 5, "seconds": "1.25", "fps": 4.0}
        assert told.items() <= video.items() and before <= video["created_at"] <= time.time()
        await reaches(omni, video, "queued")
        assert (await get(http, video))["status"] == "queued"
        omni.gates["queued"].set()
        await reaches(omni, video, "denoise")
        now = await get(http, video)
        assert (now["status"], now["progress"]) == ("in_progress", 43)
        refused = await http.get(f"{VIDEOS}/{video['id']}/content")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "video_not_ready")
        omni.gates["denoise"].set()
        await reaches(omni, video, "frames")
        assert 90 < (await get(http, video))["progress"] < 100
        omni.gates["frames"].set()
        done = await ended(http, video)
        assert (done["status"], done["progress"], done["seed"], done["error"]) == ("completed", 100, 3, None)
        assert done["expires_at"] - done["completed_at"] == 86400
        content = (await http.get(f"{VIDEOS}/{video['id']}/content")).content
        frames, rate, samples = decoded(content)
        assert (len(frames), frames[0].shape, rate, samples) == (5, (32, 32, 3), 4.0, 0)
        assert [round(float(frame.mean()) / 10) for frame in frames] == list(range(5))
        assert omni.aborted == []

    run(scenario, tmp_path)


@pytest.mark.parametrize("chunked", [True, False])
def test_a_video_with_sound(tmp_path: Path, chunked: bool) -> None:
    omni = FakeVideoOmni(sound=True)
    omni.chunked = chunked

    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        for format, kind in (("mp4", "video/mp4"), ("webm", "video/webm"), ("gif", "image/gif")):
            done = await ended(http, await create(http, output_format=format))
            assert done["status"] == "completed", done
            response = await http.get(f"{VIDEOS}/{done['id']}/content")
            assert response.headers["content-type"] == kind
            frames, rate, samples = decoded(response.content)
            assert (len(frames), frames[0].shape, rate) == (9, (32, 48, 3), pytest.approx(8.0, rel=0.05))
            if format == "mp4":
                assert samples == pytest.approx(9 * 2000, abs=2048), "one frame of AAC more at most"
            assert (samples == 0) == (format == "gif")

    run(scenario, tmp_path, omni)


def test_files_in_part_and_again(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        url = f"{VIDEOS}/{(await ended(http, await create(http)))['id']}/content"
        whole = await http.get(url)
        size, etag = len(whole.content), whole.headers["etag"]
        assert int(whole.headers["content-length"]) == size and whole.headers["accept-ranges"] == "bytes"
        assert whole.headers["content-disposition"].endswith('.mp4"')
        head = await http.head(url)
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(size))

        async def part(value: str, **headers: str) -> httpx.Response:
            return await http.get(url, headers={"range": value} | headers)

        for asked, cut in (("bytes=0-9", slice(0, 10)), ("bytes=10-", slice(10, None)), ("bytes=-7", slice(-7, None))):
            response = await part(asked)
            assert (response.status_code, response.content) == (206, whole.content[cut])
        assert (await part("bytes=5-999999999")).headers["content-range"] == f"bytes 5-{size - 1}/{size}"
        for asked in (f"bytes={size}-", "bytes=-0"):
            beyond = await part(asked)
            assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{size}")
            assert beyond.json()["error"]["code"] == "range_not_satisfiable"
        for asked in ("bytes=9-3", "bytes=-", "lines=1-2", "bytes=0-1,4-5", "bytes=a-b"):
            assert (await part(asked)).content == whole.content
        assert (await part("bytes=0-9", **{"if-range": etag})).status_code == 206
        assert (await part("bytes=0-9", **{"if-range": '"other"'})).status_code == 200
        assert (await http.get(url, headers={"if-none-match": f'"x", W/{etag}'})).status_code == 304
        assert (await http.get(url, headers={"if-none-match": '"x"'})).status_code == 200
        since = {"if-modified-since": whole.headers["last-modified"]}
        assert (await http.get(url, headers=since)).status_code == 304
        assert (await http.get(url + "?variant=video")).status_code == 200
        assert (await http.get(url + "?variant=thumbnail")).status_code == 400

    run(scenario, tmp_path)


def test_pages(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        empty = (await http.get(VIDEOS)).json()
        assert empty == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}
        ids = [(await create(http, prompt=str(i)))["id"] for i in range(5)]
        page = (await http.get(VIDEOS, params={"limit": 2})).json()
        assert ([video["id"] for video in page["data"]], page["has_more"]) == (ids[:2:-1], True)
        page = (await http.get(VIDEOS, params={"limit": 3, "after": page["last_id"]})).json()
        assert ([video["id"] for video in page["data"]], page["has_more"]) == (ids[2::-1], False)
        page = (await http.get(VIDEOS, params={"order": "asc", "after": ids[3]})).json()
        assert [video["prompt"] for video in page["data"]] == ["4"]
        for query in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "x"}, {"page": 1}):
            response = await http.get(VIDEOS, params=query)
            assert (response.status_code, response.json()["error"]["param"]) == (400, *query)

    run(scenario, tmp_path)


def test_no_such_video(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        for name in ("nothing", "video_" + "0" * 32, "..%2F..%2Fetc", "video_" + "0" * 31 + "é"):
            for method, end in (("GET", ""), ("GET", "/content"), ("HEAD", "/content"), ("DELETE", "")):
                response = await http.request(method, f"{VIDEOS}/{name}{end}")
                assert response.status_code == 404

    run(scenario, tmp_path)


def test_deletion(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        done = await ended(http, await create(http))
        for gate in ("queued", "denoise", "frames"):
            omni.gates[gate].clear()
            video = await create(http)
            await reaches(omni, video, gate)
            answer = await http.delete(f"{VIDEOS}/{video['id']}")
            assert answer.json() == {"id": video["id"], "object": "video.deleted", "deleted": True}
            assert omni.aborted[-1] == video["id"]
            assert (await http.get(f"{VIDEOS}/{video['id']}")).status_code == 404
            assert (await http.delete(f"{VIDEOS}/{video['id']}")).status_code == 404
            omni.gates[gate].set()
            assert files(tmp_path) == {f"{done['id']}.mp4"}
        assert (await http.delete(f"{VIDEOS}/{done['id']}")).status_code == 200
        assert files(tmp_path) == set() and (await http.get(VIDEOS)).json()["data"] == []

    run(scenario, tmp_path)


def test_deletion_racing_completion_leaves_neither_file_nor_job(tmp_path: Path) -> None:
    chance = random.Random(0)

    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        async def one() -> None:
            video = await create(http, num_frames=1 + 4 * chance.randrange(3))
            await asyncio.sleep(chance.random() * 0.1)
            answers = await asyncio.gather(*(http.delete(f"{VIDEOS}/{video['id']}") for _ in range(2)))
            assert sorted(answer.status_code for answer in answers) == [200, 404]
            assert (await http.get(f"{VIDEOS}/{video['id']}/content")).status_code == 404

        for _ in range(5):
            await asyncio.gather(*(one() for _ in range(8)))
            assert files(tmp_path) == set() and (await http.get(VIDEOS)).json()["data"] == []

    run(scenario, tmp_path)


def test_failures(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        omni.fails_with = OutOfMemoryError("does not fit: see /secret/path")
        failed = await ended(http, await create(http))
        error = {"code": "out_of_memory", "message": "does not fit: see ...", "param": None}
        assert (failed["status"], failed["error"], failed["progress"]) == ("failed", error, 85)
        assert failed["expires_at"] is not None
        omni.fails_with = KeyError("a bug")
        failed = await ended(http, await create(http))
        assert failed["error"]["code"] == "internal_error" and "bug" not in failed["error"]["message"]
        omni.fails_with = None
        assert (await ended(http, await create(http)))["status"] == "completed"
        assert len(files(tmp_path)) == 1

    run(scenario, tmp_path)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = [True]
    add = VideoWriter.add_frames

    def add_frames(self: VideoWriter, frames: Any) -> None:
        if full[0] and self.frames >= 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, frames)

    monkeypatch.setattr(VideoWriter, "add_frames", add_frames)

    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        failed = await ended(http, await create(http))
        assert failed["error"]["code"] == "storage_full" and "No space left" in failed["error"]["message"]
        assert files(tmp_path) == set() and omni.aborted == [failed["id"]]
        response = await http.post(f"{VIDEOS}/sync", json={"prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (507, "storage_full")
        assert files(tmp_path) == set()
        full[0] = False
        assert (await ended(http, await create(http)))["status"] == "completed"

    run(scenario, tmp_path)


def test_limits_of_what_is_kept(tmp_path: Path) -> None:
    async def jobs(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        video = await create(http)
        response = await http.post(VIDEOS, json={"prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (507, "storage_full")
        assert len(omni.aborted) == 1
        await ended(http, video)
        await http.delete(f"{VIDEOS}/{video['id']}")
        await create(http)

    async def size(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        failed = await ended(http, await create(http, num_frames=201, output_format="gif", size="256x256"))
        assert failed["error"]["code"] == "storage_full" and "--video-max-bytes" in failed["error"]["message"]
        assert files(tmp_path / "b") == set()

    run(jobs, tmp_path / "a", video_max_jobs=1)
    run(size, tmp_path / "b", video_max_bytes=500)


def test_expiry(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        done = await ended(http, await create(http))
        url = f"{VIDEOS}/{done['id']}"
        while (await http.get(url)).status_code == 200:
            await asyncio.sleep(0.01)
        assert (await http.get(url + "/content")).status_code == 404
        assert (await http.get(VIDEOS)).json()["data"] == []
        assert (await http.delete(url)).status_code == 404
        while files(tmp_path):
            await asyncio.sleep(0.01)

    run(scenario, tmp_path, video_ttl=0.5)


def test_a_server_that_stops(tmp_path: Path) -> None:
    ids = []

    async def first(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        ids.append((await ended(http, await create(http)))["id"])
        omni.gates["denoise"].clear()
        video = await create(http)
        await reaches(omni, video, "denoise")
        ids.append(video["id"])
        omni.gates["denoise"].set()
        omni.live.clear()  # as the orchestrator does when its time to drain is over

    async def second(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        done, stopped = [(await http.get(f"{VIDEOS}/{name}")).json() for name in ids]
        assert (done["status"], stopped["status"], stopped["progress"]) == ("completed", "failed", 43)
        assert len((await http.get(f"{VIDEOS}/{ids[0]}/content")).content) > 100

    run(first, tmp_path)
    run(second, tmp_path)


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


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing"),
    ({"seconds": "0"}, "seconds", "above 0"),
    ({"seconds": "abc"}, "seconds", "above 0"),
    ({"seconds": float("1e9")}, "seconds", "above 0"),
    ({"seconds": "nan"}, "seconds", "above 0"),
    ({"seconds": True}, "seconds", ""),
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


def test_other_refusals(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        assert (await http.post(VIDEOS, json={"prompt": "a", "model": "x"})).status_code == 404
        assert (await http.post(VIDEOS, content=b"a", headers={"content-type": "text/plain"})).status_code == 415
        omni.status = "draining"
        assert (await http.post(VIDEOS, json={"prompt": "a"})).status_code == 503
        assert (await http.get(VIDEOS)).status_code == 200, "what there is can still be had"

    run(scenario, tmp_path)


def test_a_model_that_makes_pictures_has_no_videos(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with client(FakeOmni()) as http:
            for method, url in (("POST", VIDEOS), ("GET", VIDEOS), ("GET", f"{VIDEOS}/video_{'0' * 32}")):
                response = await http.request(method, url, json={"prompt": "a"} if method == "POST" else None)
                assert (response.status_code, response.json()["error"]["param"]) == (400, "model")

    asyncio.run(scenario())


def test_a_video_at_once(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        response = await http.post(f"{VIDEOS}/sync", json={"prompt": "a", "seed": 9, "num_frames": 5})
        told = {"content-type": "video/mp4", "x-seed": "9", "x-fps": "8", "x-num-frames": "5", "x-size": "48x32"}
        assert response.status_code == 200 and told.items() <= dict(response.headers).items()
        assert len(decoded(response.content)[0]) == 5
        assert files(tmp_path) == set() and (await http.get(VIDEOS)).json()["data"] == []
        omni.gates["frames"].clear()
        asking = asyncio.create_task(http.post(f"{VIDEOS}/sync", json={"prompt": "a"}))
        while "frames" not in [omni.at.get(name) for name in omni.live]:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert len(omni.aborted) == 1 and files(tmp_path) == set()

    run(scenario, tmp_path)


def test_a_second_server_is_told(tmp_path: Path) -> None:
    held = VideoStore.open(tmp_path, 1.0)
    try:

        async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
            assert (await http.get(VIDEOS)).status_code == 500

        run(scenario, tmp_path)
    finally:
        held.close()
