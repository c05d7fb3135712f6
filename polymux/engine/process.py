"""The stage process: one engine, driven by messages from the API process.

    python -m polymux.engine.process --fd N

N is one end of a socket pair. What the process does is in `stage`, and with Ray in `ray_stage`.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from polymux import logs
from polymux.config import EngineConfig, LogConfig
from polymux.engine.channel import Channel
from polymux.engine.engines import engine_for, ranks_for
from polymux.engine.stage import MakeEngine, MakeRanks, run


def _on_ray(channel: Channel, config: EngineConfig) -> None:
    from polymux.engine.ray_stage import RayStage  # Ray, which may not be installed

    RayStage(channel, config).run()


def main(
    arguments: Sequence[str] | None = None,
    make_engine: MakeEngine = engine_for,
    make_ranks: MakeRanks = ranks_for,
) -> int:
    parser = argparse.ArgumentParser(prog="polymux.engine.process", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the socket to the API process")
    fd = parser.parse_args(arguments).fd
    logs.configure(LogConfig())
    faulthandler.enable()
    comm = Path("/proc/self/comm")
    if comm.exists():
        comm.write_text("polymux-stage")  # the name that top shows
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when a stage ends
    return run(fd, make_engine, make_ranks, _on_ray)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: to take an interpreter with a model's libraries apart costs seconds, and a device in trouble may
    # hang there. What has to be put away is put away by the engine's close().
    os._exit(code)
