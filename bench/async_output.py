"""What it brings that finished videos leave the engine in a thread: jobs one after the other against jobs in a row.

    python bench/async_output.py            one GPU: Wan-14B's size at 480x832x33, random weights
    python bench/async_output.py --tiny     small, to see that it works; also on a CPU

engine: requests in an engine, with conversion and copy in its own thread ("plain") and in the output thread. The bytes
must be the same. files: jobs through a stage process and an encoder, as the server runs them; "overlap" is the time of
JOBS jobs one after the other, over that of as many at once with one place in flight. Prints Markdown tables; JSON goes
to the folder that OUT names.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import tempfile
import time
from pathlib import Path

import torch
from real_size import make_model
from report import Table, save

from polymux.config import EngineConfig
from polymux.diffusion.outputs import RawOutput
from polymux.engine.diffusion_engine import DiffusionEngine
from polymux.engine.outbound import Outbound, OutputThread
from polymux.omni import AsyncOmni
from polymux.omni_output import OmniRequestOutput
from polymux.request import Failed, OmniDiffusionSamplingParams, OutputChunk, Request
from polymux.server.video_file import VideoFile

JOBS = 4


class InTheEnginesThread(OutputThread):
    """The plain path: nothing else runs while an output is converted and copied."""

    def send(self, request_id: str, output: int, raw: RawOutput, at_once: bool) -> Outbound:
        outbound = super().send(request_id, output, raw, at_once)
        self.wait([outbound], 600)
        return outbound


def engine_seconds(config: EngineConfig, params: OmniDiffusionSamplingParams, plain: bool) -> tuple[float, str]:
    """Seconds of JOBS requests in a row, and a digest of all their frames."""
    engine = DiffusionEngine.load(config)
    if plain:
        engine.outputs.close()
        engine.outputs = InTheEnginesThread(engine.device, config.process.output_chunk_bytes)
    engine.warm_up()
    drive(engine, params, 1)
    start = time.perf_counter()
    digest = drive(engine, params, JOBS)
    seconds = time.perf_counter() - start
    engine.close()
    del engine
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return seconds, digest


def drive(engine: DiffusionEngine, params: OmniDiffusionSamplingParams, jobs: int) -> str:
    digests = {str(job): hashlib.sha256() for job in range(jobs)}
    for name in digests:
        engine.add(Request(request_id=name, prompt="a cat", params=params))
    while engine.busy:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, OutputChunk):
                digests[event.request_id].update(event.rows.data)
                engine.taken(event.request_id)
    assert len({digest.hexdigest() for digest in digests.values()}) == 1, "the same request, the same frames"
    return digests["0"].hexdigest()


async def file_seconds(config: EngineConfig, params: OmniDiffusionSamplingParams, folder: Path) -> tuple[float, float]:
    """Seconds of JOBS jobs one after the other, and all at once."""
    async with AsyncOmni.from_config(config) as omni:

        async def job(name: str) -> None:
            file = VideoFile(folder / f"{name}.mp4", "mp4", 16, None)
            async for event in omni.stream("a cat", params):
                if isinstance(event, OutputChunk):
                    await asyncio.to_thread(file.add, event)
                elif isinstance(event, OmniRequestOutput):
                    await asyncio.to_thread(file.finish, event)

        await job("first")
        start = time.perf_counter()
        for index in range(JOBS):
            await job(f"alone-{index}")
        alone = time.perf_counter() - start
        start = time.perf_counter()
        await asyncio.gather(*(job(f"together-{index}") for index in range(JOBS)))
        return alone, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    tiny = parser.parse_args().tiny
    steps = parser.parse_args().steps
    size = {"width": 128, "height": 128, "num_frames": 17} if tiny else {"width": 832, "height": 480, "num_frames": 33}
    params = OmniDiffusionSamplingParams(**size, num_inference_steps=steps, seed=1, guidance_scale=1.0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model("wan-tiny" if tiny else "wan-14b", folder)
        config = EngineConfig.from_flat(
            model=str(model),
            load_format="dummy",
            max_num_seqs=1,
            enforce_eager=True,
            output_chunk_bytes=2**16 if tiny else 8 * 2**20,
        )
        engines = Table("engine", ("path", "seconds", "ratio", "equal"))
        plain, wanted = engine_seconds(config, params, plain=True)
        engines.add(path="plain", seconds=plain, ratio=1.0)
        beside, digest = engine_seconds(config, params, plain=False)
        engines.add(path="output thread", seconds=beside, ratio=plain / beside, equal=digest == wanted)
        files = Table("files", ("jobs", "one after the other s", "at once s", "overlap"))
        alone, together = asyncio.run(file_seconds(config, params, folder))
        files.add(jobs=JOBS, one_after_the_other_s=alone, at_once_s=together, overlap=alone / together)
        save("async_output.json", [engines, files], size=size, steps=steps)


if __name__ == "__main__":
    main()
