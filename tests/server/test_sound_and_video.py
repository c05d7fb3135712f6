"""Sound over HTTP and video from the command, for real: what is in the files is what diffusers computes."""

from __future__ import annotations

import io
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from server_process import MODEL, START_S, error_of, serving

from polymux.config import stage_environment
from polymux.media.decode import MediaLimits, decode_audio, decode_video

URL = "/v1/audio/generate"
LIMITS = MediaLimits(file_bytes=10**8, pixels=10**6, frames=100, seconds=100)


def test_sound_over_http(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_checkpoint("stable-audio")
    body = {
        "model": MODEL,
        "prompt": "music",
        "seconds": 0.02,
        "num_inference_steps": 2,
        "guidance_scale": 2,
        "seed": 1,
    }
    with serving(folder, tmp_path, "--max-audio-seconds", "5") as server:
        answers = {f: server.http.post(URL, json=body | {"response_format": f}) for f in ("wav", "flac", "mp3", "opus")}
        again = server.http.post(URL, json=body | {"seed": None})
        bad: dict[str, Any] = {"seconds": 6, "response_format": "aac", "lyrics": "la", "seed": -1}
        refused = {name: server.http.post(URL, json=body | {name: value}) for name, value in bad.items()}
        pictures = server.post({"model": MODEL, "prompt": "a"})
        assert server.outcomes() == {"completed": 5, "failed": 0, "aborted": 0, "refused": 5}
    with wave.open(io.BytesIO(answers["wav"].content)) as file:
        assert (file.getnchannels(), file.getframerate()) == (2, 44100)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2).T
    wanted = _reference(folder)
    assert np.abs(samples - (wanted.clip(-1, 1) * 32767).round()).max() <= 1
    assert answers["wav"].headers["x-clipped-samples"] == str((np.abs(wanted) > 1).sum())
    for answer in answers.values():
        assert answer.status_code == 200 and answer.headers["x-seed"] == "1"
        read = decode_audio(answer.content, LIMITS)
        assert read.samples.shape[1] / read.sample_rate == float(answer.headers["x-duration"])
    assert again.status_code == 200 and again.content != answers["wav"].content
    for name, answer in refused.items():
        assert answer.status_code == 400 and error_of(answer)["param"] == name
    assert error_of(pictures)["param"] == "model"


def _reference(folder: Path) -> np.ndarray[Any, Any]:
    pipeline = diffusers.StableAudioPipeline.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        made = pipeline(
            prompt="music",
            audio_end_in_s=0.02,
            num_inference_steps=2,
            guidance_scale=2.0,
            generator=torch.Generator().manual_seed(1),
            output_type="np",
        )
    return np.asarray(made.audios[0])


def test_video_from_the_command(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_checkpoint("ltx2")
    words = [
        "--model",
        str(folder),
        "--prompt",
        "a",
        "--size",
        "64x64",
        "--steps",
        "2",
        "--seconds",
        "0.3",
        "--seed",
        "1",
    ]
    command = [sys.executable, "-m", "polymux.cli", "generate", *words]
    refused = subprocess.run(
        [*command, "-o", "a.wav"], capture_output=True, text=True, cwd=tmp_path, env=stage_environment()
    )
    assert refused.returncode == 2 and "makes videos" in refused.stderr and "tep/s" not in refused.stderr
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=stage_environment(), timeout=START_S
    )
    assert (done.returncode, done.stdout) == (0, "out.mp4\n"), done.stderr
    video = decode_video(tmp_path / "out.mp4", LIMITS)
    assert video.frames.shape == (9, 64, 64, 3) and video.fps == 24  # 0.3 seconds are 8 frames, and the model makes 9
    assert video.sound is not None and video.sound.sample_rate == 24000
