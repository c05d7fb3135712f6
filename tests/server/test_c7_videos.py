"""Case C7: video jobs on a real server with a real engine."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image
from server_process import MODEL, Server, error_of, serving, until

from polymux.media.decode import MediaLimits, decode_video
from polymux.server.video_store import VideoStore

VIDEOS = "/v1/videos"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "a", "size": "64x64", "seconds": "1", "seed": 1}
BODY |= {"num_inference_steps": 4}
ENDLESS = BODY | {"num_inference_steps": 100_000}
LIMITS = MediaLimits(file_bytes=10**8, pixels=10**6, frames=1000, seconds=1000)

Kept = tuple[Server, Path]


def create(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.http.post(VIDEOS, json=BODY | fields)
    assert response.status_code == 200, response.text
    video: dict[str, Any] = response.json()
    return video


def state(server: Server, video: dict[str, Any]) -> dict[str, Any]:
    response = server.http.get(f"{VIDEOS}/{video['id']}")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def ended(server: Server, video: dict[str, Any]) -> list[dict[str, Any]]:
    """Every state that was seen, up to the last one."""
    seen = [video]
    end = time.monotonic() + 60
    while seen[-1]["status"] in ("queued", "in_progress"):
        assert time.monotonic() < end, seen[-1]
        seen.append(state(server, video))
        time.sleep(0.01)
    progress = [found["progress"] for found in seen]
    assert progress == sorted(progress)
    return seen


def runs(server: Server, video: dict[str, Any]) -> None:
    until(lambda: state(server, video)["status"] == "in_progress", 30)


def content(server: Server, video: dict[str, Any]) -> bytes:
    response = server.http.get(f"{VIDEOS}/{video['id']}/content")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "video/mp4"
    return response.content


def files(folder: Path) -> set[str]:
    return {path.name for part in ("files", "partial") for path in (folder / part).iterdir()}


def test_two_jobs_one_after_the_other(video_server: Kept) -> None:
    server, folder = video_server
    form = {name: (None, str(value)) for name, value in (BODY | {"seed": 2, "num_inference_steps": 30}).items()}
    one = create(server)
    answer = server.http.post(VIDEOS, files=form)
    assert answer.status_code == 200, answer.text
    two = answer.json()
    assert (one["object"], two["object"], two["status"]) == ("video", "video", "queued")
    refused = server.http.get(f"{VIDEOS}/{two['id']}/content")
    assert (refused.status_code, error_of(refused)["code"]) == (404, "video_not_ready")
    while True:
        second, first = state(server, two), state(server, one)
        if first["progress"] >= 85:  # it is through the engine
            break
        assert second["status"] == "queued"
    ended(server, one)
    seen = [found["progress"] for found in ended(server, two)]
    assert seen[-1] == 100 and len(set(seen)) > 2, "it is seen on its way"
    for video in (one, two):
        done = state(server, video)
        assert (done["status"], done["num_frames"], done["seconds"], done["fps"]) == ("completed", 17, "1.0625", 16)
        decoded = decode_video(content(server, video), LIMITS)
        assert decoded.frames.shape == (17, 64, 64, 3) and decoded.fps == 16
    assert content(server, one) != content(server, two)
    listed = [video["id"] for video in server.http.get(VIDEOS).json()["data"]]
    assert listed[:2] == [two["id"], one["id"]]
    again = server.http.post(f"{VIDEOS}/sync", json=BODY)
    assert again.content == content(server, one), "the same seed, the same file"
    assert again.headers["x-num-frames"] == "17"
    for video in (one, two):
        assert server.http.delete(f"{VIDEOS}/{video['id']}").status_code == 200
        assert not [name for name in files(folder) if video["id"] in name]


def test_the_file_shows_what_the_model_made(video_server: Kept, tiny_checkpoint: Callable[..., Path]) -> None:
    import diffusers
    import torch

    server, _ = video_server
    video = ended(server, create(server, num_frames=5, seconds=None, output_format="webp"))[-1]
    response = server.http.get(f"{VIDEOS}/{video['id']}/content")
    assert response.headers["content-type"] == "image/webp"
    pipeline = diffusers.WanPipeline.from_pretrained(tiny_checkpoint("wan21-t2v"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    call = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 4, "output_type": "np"}
    wanted = (pipeline("a", generator=generator, **call).frames[0] * 255).round()
    with Image.open(io.BytesIO(response.content)) as file:
        assert getattr(file, "n_frames", 1) == 5
        for index, frame in enumerate(wanted):
            file.seek(index)
            shown = np.asarray(file.convert("RGB")).astype(float)
            assert np.abs(shown.mean(axis=(0, 1)) - frame.mean(axis=(0, 1))).max() < 6, "lossy, but this picture"


def test_frames_between_frames(video_server: Kept) -> None:
    server, _ = video_server
    assert server.http.get("/v1/models").json()["data"][0]["capabilities"]["frame_interpolation"] is True
    asked = {"enable_frame_interpolation": True, "frame_interpolation_exp": 2}
    video = ended(server, create(server, **asked))[-1]
    assert (video["status"], video["num_frames"], video["fps"]) == ("completed", 65, 64)
    decoded = decode_video(content(server, video), LIMITS)
    assert decoded.frames.shape == (65, 64, 64, 3) and decoded.fps == 64
    plain = decode_video(server.http.post(f"{VIDEOS}/sync", json=BODY).content, LIMITS)
    ours, the_model_s = (frames.mean(axis=(1, 2)) for frames in (decoded.frames[::4], plain.frames))
    assert np.abs(ours - the_model_s).max() < 6, "every fourth one is the model's, but for what the encoder loses"


def test_an_adapter_acts_in_its_request_only(video_server: Kept, tiny_lora: Callable[[str], Path]) -> None:
    server, _ = video_server
    body = BODY | {"seconds": "0.1", "num_inference_steps": 2, "output_format": "webp"}
    lora = {"path": tiny_lora("wan21-t2v").name, "scale": 4}
    answers = [server.http.post(f"{VIDEOS}/sync", json=body | {"lora": asked}) for asked in (None, lora, None)]
    assert [answer.status_code for answer in answers] == [200] * 3, answers[1].text
    before, tuned, after = (answer.content for answer in answers)
    assert before == after != tuned


def test_deletion_stops_the_engine(video_server: Kept) -> None:
    server, folder = video_server
    video = create(server, **ENDLESS)
    runs(server, video)
    waiting = create(server)
    assert server.http.delete(f"{VIDEOS}/{waiting['id']}").json()["deleted"] is True
    assert server.http.delete(f"{VIDEOS}/{video['id']}").json()["deleted"] is True
    until(lambda: server.running() == 0, 5)
    assert server.http.get(f"{VIDEOS}/{video['id']}").status_code == 404
    assert server.http.delete(f"{VIDEOS}/{video['id']}").status_code == 404
    assert not [name for name in files(folder) if video["id"] in name]


def test_a_full_queue(video_server: Kept) -> None:
    server, _ = video_server
    videos = [create(server, **ENDLESS) for _ in range(4)]
    response = server.http.post(VIDEOS, json=BODY)
    assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
    assert int(response.headers["retry-after"]) >= 1
    for video in videos:
        assert server.http.delete(f"{VIDEOS}/{video['id']}").status_code == 200
    until(lambda: server.running() == server.waiting() == 0, 5)


def test_leaving_a_synchronous_request_stops_the_engine(video_server: Kept) -> None:
    server, folder = video_server
    with pytest.raises(Exception, match="timed out"):
        server.http.post(f"{VIDEOS}/sync", json=ENDLESS, timeout=1)
    until(lambda: server.running() == 0, 5)
    assert not list((folder / "partial").iterdir())


@pytest.mark.parametrize("bad", [{"seconds": "0"}, {"seconds": "-1"}, {"seconds": "abc"}, {"fps": 0}])
def test_bad_durations(video_server: Kept, bad: dict[str, Any]) -> None:
    server, _ = video_server
    response = server.http.post(VIDEOS, json=BODY | bad)
    assert response.status_code == 400 and error_of(response)["param"] == next(iter(bad))


def test_openai_s_client(video_server: Kept) -> None:
    server, _ = video_server
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    fields: Any = {"model": MODEL, "prompt": "a", "size": "64x64", "seconds": "1"}
    more = {"num_inference_steps": 2, "seed": 1, "extra_args": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        video = client.videos.create_and_poll(**fields, extra_body=more, poll_interval_ms=50)
        assert (video.status, video.progress, video.seconds, video.size) == ("completed", 100, "1.0625", "64x64")
        assert client.videos.retrieve(video.id) == video
        other = client.videos.create(**fields, extra_body=more)
        assert [found.id for found in client.videos.list(limit=1, order="desc")][:2] == [other.id, video.id]
        data = client.videos.download_content(video.id).read()
        assert decode_video(data, LIMITS).frames.shape == (17, 64, 64, 3)
        for name in (other.id, video.id):
            assert client.videos.delete(name).deleted
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(video.id)
        with pytest.raises(openai.BadRequestError, match="text alone"):
            client.videos.create(**fields, input_reference=("a.png", b"not used", "image/png"))


def test_a_server_that_is_killed_and_one_that_is_told_to_stop(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model, kept = tiny_checkpoint("wan21-t2v"), tmp_path / "kept"
    flags = ("--max-num-seqs", "1", "--max-inference-steps", "200000", "--video-dir", str(kept))
    with serving(model, tmp_path, *flags) as server:
        done = ended(server, create(server))[-1]
        before = content(server, done)
        running, queued = create(server, **ENDLESS), create(server)
        runs(server, running)
        (kept / "partial" / ("0" * 32)).write_bytes(b"ftyp")  # named as those are that are being written
        stages = server.stages()
        server.signal(signal.SIGKILL)
        server.wait()
        until(lambda: not any(stage.is_running() and stage.status() != "zombie" for stage in stages))
    with serving(model, tmp_path, *flags, "--shutdown-grace", "0.1") as server:
        assert state(server, done) == done and content(server, done) == before
        for video in (running, queued):
            failed = state(server, video)
            assert (failed["status"], failed["error"]["code"]) == ("failed", "server_stopped")
            refused = server.http.get(f"{VIDEOS}/{video['id']}/content")
            assert refused.status_code == 404
        assert files(kept) == {f"{done['id']}.mp4"}
        words = [str(word) for word in server.process.args]  # type: ignore[union-attr]
        second = subprocess.run(words, capture_output=True, text=True)
        assert second.returncode == 2 and "belongs to another server" in second.stderr
        stopped = create(server, **ENDLESS)
        runs(server, stopped)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    store = VideoStore.open(kept, 0)
    try:
        found = store.get(stopped["id"])
        assert found is not None and (found.status, found.error_code) == ("failed", "not_ready")
        assert found.expires_at is not None, "its server has told so"
    finally:
        store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_and_expiry(tiny_checkpoint: Callable[..., Path], tmp_path: Path, small_disk: Path) -> None:
    kept, filler = small_disk / "kept", small_disk / "filler"
    with serving(tiny_checkpoint("wan21-t2v"), tmp_path, "--video-dir", str(kept), "--video-ttl", "1") as server:
        assert ended(server, create(server))[-1]["status"] == "completed"
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while os.statvfs(small_disk).f_bavail * 4096 > 2**18:
                file.write(bytes(2**12))
                file.flush()
        large = {"size": "256x256", "num_frames": 17, "seconds": None, "num_inference_steps": 1}
        failed = ended(server, create(server, **large))[-1]
        assert failed["error"]["code"] == "storage_full", failed
        response = server.http.post(f"{VIDEOS}/sync", json=BODY | large)
        assert (response.status_code, error_of(response)["code"]) == (507, "storage_full")
        assert not list((kept / "partial").iterdir()) and server.health() == 200
        filler.unlink()
        video = ended(server, create(server))[-1]
        assert video["status"] == "completed"
        until(lambda: server.http.get(f"{VIDEOS}/{video['id']}").status_code == 404)
        assert server.http.get(f"{VIDEOS}/{video['id']}/content").status_code == 404
        assert server.http.get(VIDEOS).json()["data"] == []
        until(lambda: not files(kept))
