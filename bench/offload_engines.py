"""Two independent engines of one host: private weights against the runtime cache, cold and warm.

Each engine is a process with a GPU of its own, as far as there are GPUs. Started together; memory is measured while
both live.
The checkpoint has a denoiser of real size; its text encoder and autoencoder are tiny, so start-up is the denoiser's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import torch
from denoisers import Denoiser, denoisers
from report import Table, host_memory, save

from polymux.testing.tiny import make

ENGINES = 2
CACHED = ["--dlo-enable-runtime-cache", "--dlo-runtime-cache-pin-limit-gib", "100"]
COLUMNS = (
    "start", "imports s", "denoiser s", "ready s", "first picture s", "step s", "PSS GiB", "summed PSS GiB",
    "summed Private_Dirty GiB", "equal",
)  # fmt: skip


def main(arguments: argparse.Namespace) -> None:
    table = Table("Two engines on one host", COLUMNS)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        folder = Path(name)
        denoiser = next(d for d in denoisers(arguments.tiny, arguments.layers) if d.name == "qwen-image")
        checkpoint = write(denoiser, folder, arguments.tiny)
        digests: set[str] = set()
        for start, flags in (("private", []), ("cache, cold", CACHED), ("cache, warm", CACHED)):
            where = [*flags, "--dlo-runtime-cache-dir", str(folder / "cache")] if flags else []
            digests |= together(table, start, checkpoint, where, arguments.tiny, digests)
    save("offload_engines.json", [table])


def write(denoiser: Denoiser, folder: Path, tiny: bool) -> Path:
    """A checkpoint around the denoiser."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = make("qwen-image", folder)
    config = json.loads((path / "transformer" / "config.json").read_text())
    width = config["joint_attention_dim"]  # of the tiny text encoder
    changes = {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}
    full = denoiser.config | ({} if tiny else changes) | {"joint_attention_dim": width}
    start = time.perf_counter()
    model: Any = Denoiser(denoiser.name, denoiser.cls, full, denoiser.inputs, denoiser.size).build(
        device, torch.bfloat16
    )
    for weights in (path / "transformer").glob("*.safetensors*"):
        weights.unlink()
    model.save_pretrained(path / "transformer", max_shard_size="5GB")
    print(f"<!-- checkpoint written in {time.perf_counter() - start:.1f} s -->", flush=True)
    return path


def together(table: Table, start: str, checkpoint: Path, flags: list[str], tiny: bool, known: set[str]) -> set[str]:
    """Two engines at once; a row for each. Returns the digests of what they made."""
    command = [sys.executable, __file__, str(checkpoint), "64" if tiny else "1024", *flags]
    engines = []
    gpus = max(1, torch.cuda.device_count())
    for number in range(ENGINES):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(number % gpus), "BENCH_STARTED": repr(time.time())}
        engines.append(
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    reports = [answer(engine.stdout) for engine in engines]  # both have made their picture
    memory = []
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write("measure\n")
        engine.stdin.flush()
        memory.append(answer(engine.stdout))
    digests = {report.pop("digest") for report in reports}
    for report, own in zip(reports, memory, strict=True):
        table.add(
            start=start, **report, PSS_GiB=own["Pss"], equal=len(digests | known) == 1,
            summed_PSS_GiB=sum(m["Pss"] for m in memory),
            summed_Private_Dirty_GiB=sum(m["Private_Dirty"] for m in memory),
        )  # fmt: skip
    for engine in engines:
        engine.communicate("\n")
    return digests


def answer(stream: IO[str] | None) -> dict[str, Any]:
    assert stream is not None
    line = stream.readline()
    assert line, "an engine has ended; see its messages"
    found: dict[str, Any] = json.loads(line)
    return found


def engine(checkpoint: str, size: int, flags: list[str]) -> None:
    """One of the engines: loads, makes a picture, tells, waits."""
    started = float(os.environ["BENCH_STARTED"])
    from polymux.cli.flags import Parser, add_config, given
    from polymux.config import EngineConfig
    from polymux.engine.diffusion_engine import DiffusionEngine
    from polymux.knobs import build
    from polymux.loading import cached, component
    from polymux.request import Finished, OmniDiffusionSamplingParams, Request

    for module in (cached, component):
        module.logger.setLevel("INFO")
    torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
    imports = time.time() - started
    parser = Parser(prog="engine")
    add_config(parser, EngineConfig)
    words = ["--model", checkpoint, "--enable-distributed-layerwise-offload", "--dlo-no-use-allgather", *flags]
    namespace = parser.parse(words if flags else ["--model", checkpoint, "--enable-layerwise-offload"])
    config = build(EngineConfig, given(namespace, EngineConfig))
    before = time.time()
    made = DiffusionEngine.load(config)
    loaded = time.time()
    params = OmniDiffusionSamplingParams(width=size, height=size, num_inference_steps=4, seed=1)
    pictures = []
    for name in ("first", "second"):
        begun = time.time()
        made.add(Request(request_id=name, prompt="a cat", params=params))
        events = []
        while made.busy:
            events += made.step()
        assert isinstance(events[-1], Finished), events[-1]
        pictures.append((time.time() - begun, events[-1]))
    digest = hashlib.sha256(pictures[0][1].outputs[0][0].data).hexdigest()
    report = {
        "imports_s": imports, "denoiser_s": loaded - before, "ready_s": loaded - started,
        "first_picture_s": loaded - started + pictures[0][0],
        "step_s": pictures[1][1].metrics.denoise / pictures[1][1].metrics.steps, "digest": digest,
    }  # fmt: skip
    print(json.dumps(report), flush=True)
    sys.stdin.readline()
    print(json.dumps(host_memory("Pss", "Private_Dirty")), flush=True)
    sys.stdin.readline()
    made.close()


if __name__ == "__main__":
    engine(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
