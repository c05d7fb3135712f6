"""Speech of Qwen3-TTS's size, streamed to 1, 8, 32 and 64 listeners at once: first audio, real-time factor, underruns.

    python bench/speech.py [--streams 1 8 32 64] [--frames 100] [--rounds 2] [--ways compiled plain off generate]
    python bench/speech.py --tiny --streams 1 4 --frames 12      # on a CPU

A talker of 1.7B and the codec, with random weights, in the engine; requests arrive together, and each writes as many
frames of 80 ms. "first audio": from a request's arrival until its first samples are out, median and 95th percentile.
"RTF": seconds of the clock for one second of each stream's sound. "underruns": parts that come after the listener, who
began with the first one, has heard all that was there. Ways: sentences go on together, as --decode-graphs says
(compiled, plain, off), or each in a loop of its own (--decoding generate). "loop" runs the same modules in a plain
loop, one request after the other, without an engine, in the same run: its RTF is that of a stream that waits for
nobody, "x loop" how many times more sound per second the others make. "talker" and "codec" are the seconds that a run
of them takes. --profile: what the kernels of six frames take, of the first of --ways and the fewest streams.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as T
from report import Clock, Table, save

from polymux import logs
from polymux.config import EngineConfig, LogConfig
from polymux.engine.answering import load_speaking
from polymux.engine.device import resolve_device
from polymux.engine.generate_engine import GenerateEngine
from polymux.families.qwen3_tts import CHUNK
from polymux.loading import auto_dtype
from polymux.models.qwen3_tts.codec import Qwen3TTSTokenizerV2Model
from polymux.models.qwen3_tts.configs import Qwen3TTSConfig, Qwen3TTSTokenizerV2Config
from polymux.models.qwen3_tts.model import Qwen3TTSForConditionalGeneration
from polymux.omni_output import samples_of
from polymux.request import Failed, Finished, Request, SamplingParams, SoundPiece
from polymux.testing.tiny.driver import make
from polymux.testing.tiny.registry import DEFAULT
from polymux.testing.tiny.tokenizers import qwen_tokenizer, role_tokens

LINE = "the quick brown fox jumps over the lazy dog while two people walk along the river at night"
_LAYERS = {
    "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 32768, "attention_bias": False,
}  # fmt: skip


def model_config(tok: Any) -> Qwen3TTSConfig:
    names = {"pad": 2148, "bos": 2149, "eos_token": 2150, "think": 2154, "nothink": 2155, "think_bos": 2156,
             "think_eos": 2157}  # fmt: skip
    predictor = _LAYERS | {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5}
    talker = _LAYERS | {f"codec_{name}_id": number for name, number in names.items()} | {
        "vocab_size": 3072, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_code_groups": 16, "text_hidden_size": 2048, "text_vocab_size": 151936, "code_predictor_config": predictor,
        "codec_language_id": {"english": 2050}, "spk_id": {"anna": 3066}, "spk_is_dialect": {"anna": False},
    }  # fmt: skip
    ids = tok.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    return Qwen3TTSConfig(
        talker_config=talker, tts_model_type="custom_voice", tts_model_size="1b7", tts_bos_token_id=ids[0],
        tts_eos_token_id=ids[1], tts_pad_token_id=ids[2],
    )  # fmt: skip


def codec_config() -> Qwen3TTSTokenizerV2Config:
    decoder = {
        "codebook_size": 2048, "codebook_dim": 512, "latent_dim": 1024, "hidden_size": 512, "num_quantizers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "intermediate_size": 1024,
        "num_hidden_layers": 8, "sliding_window": 72, "max_position_embeddings": 8000, "rope_theta": 10000,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2],
        "decoder_dim": 1536,
    }  # fmt: skip
    return Qwen3TTSTokenizerV2Config(decoder_config=decoder, encoder_config=T.MimiConfig().to_dict())


def make_real(folder: Path, device: torch.device, dtype: torch.dtype) -> Path:
    """A checkpoint of the published size; the end is never likely."""
    tok = role_tokens(qwen_tokenizer())
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = Qwen3TTSForConditionalGeneration(model_config(tok)).to(dtype)
        codec = Qwen3TTSTokenizerV2Model(codec_config()).to(dtype)
        for module in (model, codec):
            for name, tensor in module.named_parameters():
                if tensor.ndim > 1:
                    tensor.normal_(std=0.02)
                elif "cluster_usage" in name:
                    tensor.fill_(1)
        model.talker.codec_head.weight[model.talker.end].zero_()
    for part, place in ((model, folder), (codec, folder / "speech_tokenizer")):
        part.save_pretrained(place)
    tok.save_pretrained(folder)
    return folder


@dataclass
class Listener:
    """One stream: when its parts came, and how long they are."""

    began: float = 0.0
    times: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.times[0] - self.began

    @property
    def underruns(self) -> int:
        heard_until, count = self.times[0], 0
        for at, length in zip(self.times, self.seconds, strict=True):
            count += at > heard_until + 1e-9
            heard_until = max(heard_until, at) + length
        return count


def params_of(frames: int, seed: int) -> SamplingParams:
    return SamplingParams(voice="anna", language="english", seed=seed, max_new_tokens=frames + 1)


def streams(engine: GenerateEngine, count: int, frames: int) -> list[Listener]:
    """So many requests at once, each heard as fast as it comes."""
    listeners = {str(i): Listener(time.perf_counter()) for i in range(count)}
    for i in range(count):
        engine.add(Request(request_id=str(i), prompt=LINE, sampling=params_of(frames, i)))
    while engine.busy:
        for event in engine.step():
            if isinstance(event, Failed):
                raise RuntimeError(event.error.message)
            if isinstance(event, SoundPiece):
                listeners[event.request_id].times.append(time.perf_counter())
                listeners[event.request_id].seconds.append(
                    samples_of(event).shape[1] / (event.samples.sample_rate or 1)
                )
                engine.taken(event.request_id)
            elif isinstance(event, Finished):
                assert event.sound_seconds > 0
    return list(listeners.values())


def looped(engine: GenerateEngine, frames: int) -> Listener:
    """The same request by a plain loop over the same modules."""
    parts, adapter = engine.loaded.parts, engine.family.adapter
    rate, listener = adapter.sample_rate(parts), Listener(time.perf_counter())
    job = engine._job_of(Request(request_id="loop", prompt=LINE, sampling=params_of(frames, 0)))
    torch.manual_seed(0)
    for sound in adapter.speak(parts, job.calls[0]):
        samples = sound.float().cpu()
        listener.times.append(time.perf_counter())
        listener.seconds.append(samples.shape[-1] / rate)
    return listener


def spent(engine: GenerateEngine) -> dict[str, tuple[float, int]]:
    """Seconds and runs of each module so far, by the engine's own log."""
    return {runs.component: (runs.seconds.sum, sum(runs.batches.values())) for runs in engine.stats.runs}


def per_run(engine: GenerateEngine, before: dict[str, tuple[float, int]]) -> dict[str, float]:
    """Mean seconds of a run since then."""
    made = {}
    for name, (seconds, runs) in spent(engine).items():
        known = before.get(name, (0.0, 0))
        made[name] = (seconds - known[0]) / max(runs - known[1], 1)
    return made


def best(work: Callable[[], list[Listener]], rounds: int) -> tuple[float, list[Listener]]:
    """Seconds of the quickest of some rounds, and its listeners."""
    kept: tuple[float, list[Listener]] | None = None
    for _ in range(rounds):
        start = time.perf_counter()
        made = work()
        took = time.perf_counter() - start
        if kept is None or took < kept[0]:
            kept = took, made
    assert kept is not None
    return kept


def load(folder: Path, way: str, streams: int) -> tuple[GenerateEngine, float]:
    """An engine that is warm, and the seconds that this took."""
    how = {"decoding": "generate"} if way == "generate" else {"decode_graphs": way}
    config = EngineConfig.from_flat(model=str(folder), max_num_seqs=streams, **how)
    engine = load_speaking(config)
    assert isinstance(engine, GenerateEngine)
    start = time.perf_counter()
    engine.warm_up()
    return engine, time.perf_counter() - start


def profile(engine: GenerateEngine, count: int, frames: int) -> None:
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        streams(engine, count, frames)
    cuda = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    print(f"{len(cuda)} kernels")
    table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70)
    print(f"\n{frames} frames of {count} streams\n", table, flush=True)
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=50))


def measure(engine: GenerateEngine, args: argparse.Namespace, count: int) -> dict[str, Any]:
    """A row of the table, but for what compares it."""
    streams(engine, count, 2 * CHUNK)  # warm
    before = spent(engine)
    took, made = best(lambda: streams(engine, count, args.frames), args.rounds)
    first = np.array([listener.first for listener in made])
    total = sum(sum(listener.seconds) for listener in made)
    means = per_run(engine, before)
    return {
        "streams": count,
        "first_audio_p50_s": float(np.percentile(first, 50)),
        "first_audio_p95_s": float(np.percentile(first, 95)),
        "RTF": took / (total / count),
        "underruns": sum(listener.underruns for listener in made),
        "talker_s": means.get("talker"),
        "codec_s": means.get("speech_tokenizer"),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    ways = ["compiled", "plain", "off", "generate"]
    parser.add_argument("--ways", nargs="+", default=None, choices=ways)
    parser.add_argument("--tiny", action="store_true", help="a tiny checkpoint, for a CPU")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    logs.configure(LogConfig())
    device = resolve_device("auto")
    dtype, clock = auto_dtype("auto", device), Clock(device)
    columns = ("way", "streams", "first audio p50 s", "first audio p95 s", "RTF", "underruns", "x loop")
    table = Table("Speech", (*columns, "talker s", "codec s", "GiB"))
    with tempfile.TemporaryDirectory() as name:
        folder = make("qwen3-tts", Path(name), DEFAULT) if args.tiny else make_real(Path(name), device, dtype)
        engine, _ = load(folder, "generate", 1)
        looped(engine, 2 * CHUNK)
        took, (alone,) = best(lambda: [looped(engine, args.frames)], args.rounds)
        engine.close()
        plain, first_s = took / sum(alone.seconds), alone.first
        table.add(
            way="loop", streams=1, first_audio_p50_s=first_s, first_audio_p95_s=first_s, RTF=plain,
            underruns=alone.underruns, x_loop=1.0,
        )  # fmt: skip
        for way in args.ways or (ways if device.type == "cuda" else ["off", "generate"]):
            try:
                engine, seconds = load(folder, way, max(args.streams))
                print(f"{way}: warm after {seconds:.1f} s", flush=True)
                clock.reset_peak()
                for count in args.streams:
                    row = measure(engine, args, count)
                    table.add(way=way, x_loop=count * plain / row["RTF"], GiB=clock.peak, **row)
                if args.profile:
                    args.profile = profile(engine, min(args.streams), 6)
            except RuntimeError:
                traceback.print_exc()
            engine.close()
            save("speech.json", [table], device=str(device), torch=torch.__version__, frames=args.frames)


if __name__ == "__main__":
    main()
