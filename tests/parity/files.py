"""What the public API gives, written to files and read again, is what diffusers computed."""

from __future__ import annotations

import io

import numpy as np

from polymux.media.audio import Sound, encode_audio
from polymux.media.decode import MediaLimits, decode_audio, decode_video
from polymux.media.video import encode_video, exact_fps
from polymux.media.wire import Array
from polymux.omni_output import OmniRequestOutput

from .reference import Arrays

LIMITS = MediaLimits(file_bytes=10**9, pixels=10**7, frames=1000, seconds=1000)

# Frames per second of the videos, and samples per second of the sound, of the tiny pipelines.
FPS = {
    "cogvideox": 8,
    "cosmos1-t2w": 30,
    "cosmos2-v2w": 16,
    "cosmos25-predict": 16,
    "hunyuan-video-t2v": 24,
    "hunyuan-video15-i2v": 24,
    "hunyuan-video15-t2v": 24,
    "ltx-video": 25,
    "ltx-video-i2v": 25,
    "ltx2": 24,
    "minimax-h3": 24,
    "mochi": 30,
    "skyreels-v2-t2v": 24,
    "wan21-i2v": 16,
    "wan21-t2v": 16,
    "wan21-t2v-modular": 16,
    "wan21-vace": 16,
    "wan22-i2v-moe": 16,
    "wan22-t2v-moe": 16,
    "wan22-ti2v": 24,
    "wan22-ti2v-i2v": 24,
}
SAMPLE_RATES = {"acestep": 4800, "longcat-audiodit": 800, "ltx2": 24000, "stable-audio": 44100, "minimax-h3": 1600}


def check_files(name: str, output: OmniRequestOutput, wanted: Arrays) -> None:
    """`wanted`: the reference's arrays, frames of 0..1 before sound. Latents go into no file."""
    assert (output.fps, output.sample_rate) == (FPS.get(name), SAMPLE_RATES.get(name))
    made = [*output.videos, *output.audio]
    arrays = [array.reshape(got.shape) for got, array in zip(made, wanted, strict=not output.latents)]
    if output.videos:
        _check_video(output, *arrays)
    elif output.audio:
        _check_sound(output, arrays[0])


def _check_video(output: OmniRequestOutput, frames: Array, heard: Array | None = None) -> None:
    assert output.fps is not None
    sound = None if heard is None else Sound(output.audio[0], output.sample_rate or 0)
    target = io.BytesIO()
    encode_video(output.videos[0], output.fps, target, sound=sound, lossless=True)
    read = decode_video(target.getvalue(), LIMITS)
    assert np.array_equal(read.frames, (frames * 255).round().clip(0, 255).astype(np.uint8))
    assert read.fps == exact_fps(output.fps)
    if heard is not None:
        assert read.sound is not None and read.sound.sample_rate == output.sample_rate
        assert np.abs(read.sound.samples - heard.clip(-1, 1)).max() <= 2**-22  # of 24 bits


def _check_sound(output: OmniRequestOutput, samples: Array) -> None:
    assert output.sample_rate is not None
    wanted = (samples.astype(np.float64).clip(-1, 1) * 32767).round()
    for format in ("wav", "flac"):
        read = decode_audio(encode_audio(output.audio[0], output.sample_rate, format), LIMITS)
        assert read.sample_rate == output.sample_rate
        assert np.array_equal(read.samples.astype(np.float64) * 32768, wanted)
