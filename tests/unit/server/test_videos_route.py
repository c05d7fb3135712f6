"""Video jobs over HTTP, with a generator that does what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import random
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fake_omni import FakeOmni, client
from fake_video_omni import PROFILE, FakeVideoOmni
from video_scenarios import VIDEOS, create, decoded, ended, files, get, reaches, run

from polymux.errors import OutOfMemoryError, StorageFullError
from polymux.media.video import VideoWriter
from polymux.server.video_store import VideoStore


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


def test_where_the_time_went(tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        told = msgspec.to_builtins(PROFILE)
        first = await create(http, profile=True)
        assert first["profile"] is None and (await ended(http, first))["profile"] == told
        assert (await ended(http, await create(http)))["profile"] is None
        response = await http.post(f"{VIDEOS}/sync", json={"prompt": "a", "profile": True})
        del told["steps"]
        assert json.loads(response.headers["x-profile"]) == told
        response = await http.post(f"{VIDEOS}/sync", json={"prompt": "a"})
        assert response.status_code == 200 and "x-profile" not in response.headers

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
        for asked in (f"bytes=5-{'9' * 5000}", "BYTES=5-"):
            assert (await part(asked)).content == whole.content[5:]
        assert (await part(f"bytes=-{'9' * 5000}")).content == whole.content
        for asked in (f"bytes={size}-", "bytes=-0", f"bytes={'9' * 5000}-"):
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
        bad = ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "x"}, {"page": 1})
        for query in (*bad, {"limit": ["1", "2"]}):
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


def test_a_job_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def insert(*_: Any) -> None:
        raise sqlite3.DatabaseError("a bug")

    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        assert (await http.get(VIDEOS)).status_code == 200
        monkeypatch.setattr(VideoStore, "insert", insert)
        response = await http.post(VIDEOS, json={"prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        while omni.live:
            await asyncio.sleep(0.005)
        monkeypatch.undo()
        assert (await ended(http, await create(http)))["status"] == "completed"

    run(scenario, tmp_path)


def test_a_failure_that_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise StorageFullError("the disk is full")

    def kept(video: dict[str, Any]) -> tuple[str]:
        with contextlib.closing(sqlite3.connect(next(tmp_path.rglob("videos.sqlite")))) as database:
            row: tuple[str] = database.execute("SELECT status FROM videos WHERE id = ?", (video["id"],)).fetchone()
        return row

    async def scenario(http: httpx.AsyncClient, omni: FakeVideoOmni) -> None:
        omni.fails_with = OutOfMemoryError("too large")
        with monkeypatch.context() as patch:
            patch.setattr(VideoStore, "fail", fail)
            patch.setattr(VideoStore, "delete", fail)
            video = await create(http)
            assert (await ended(http, video))["error"]["code"] == "out_of_memory", "told at once"
            assert (await http.delete(f"{VIDEOS}/{video['id']}")).status_code == 507
            assert (await http.get(VIDEOS)).json()["data"][0]["status"] == "failed"
            assert kept(video) == ("in_progress",)
        omni.fails_with = None
        await create(http)  # whose end makes the server look
        while kept(video) != ("failed",):
            await asyncio.sleep(0.005)
        assert (await ended(http, video))["error"]["code"] == "out_of_memory"

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
