"""A stage process with an engine that computes nothing. Started as `python fake_stage.py --fd N`; imports no torch.

What it does depends on the model's name (at start) and on the prompt (per request), see below.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from polymux.config import EngineConfig
from polymux.engine.process import main
from polymux.errors import CheckpointError, ConfigError, GenerationError, InvalidRequestError, RequestAbortedError
from polymux.media.wire import to_wire
from polymux.request import (
    Capabilities,
    ComponentRuns,
    Distribution,
    Event,
    Failed,
    Finished,
    OutputChunk,
    Progress,
    Request,
    RequestMetrics,
    StageStats,
)

STEP_S = 0.002
PARTS = 6
CAPABILITIES = Capabilities(
    family="fake",
    pipeline="FakePipeline",
    modality="image",
    arguments=("prompt", "negative_prompt", "height", "width", "num_inference_steps", "guidance_scale", "output_type"),
    required=("prompt",),
    media={"image": 2},
    size_multiple=8,
)


class FakeEngine:
    """A request takes `num_inference_steps` steps; its picture has the colour of its seed. In order of arrival.

    Models: "missing" (CheckpointError), "bug" (an exception), "exit" (exit code 3), "never" (does not get ready),
    "deaf" (ignores Stop), "restless" (refuses to sleep), "restless-second" (on the device auto:1),
    "coma" (dies when put to sleep), "slow" (to fall asleep),
    "tired" (does not wake up at the first time),
    "chatty" (writes what is no message), "parent" (has a child process that holds the socket).
    Prompts: "crash" (step raises), "die" (SIGKILL to itself), "picky" (add refuses), "odd" (add has a bug),
    "fail" (fails at its first step), "hang" (a step that takes for ever), "touch PATH" (makes a file),
    "parts" (a video in PARTS chunks, each when the one before is used up).
    """

    def __init__(self, config: EngineConfig) -> None:
        self.model, self.device = config.model.model, config.device.device
        self.places = config.scheduler.max_num_seqs
        self.requests: dict[str, Request] = {}
        self.steps: dict[str, int] = {}
        self.parts: dict[str, int] = {}  # chunks that are out
        self.events: list[Event] = []
        self.done = 0
        self.runs = self.level = 0
        if self.model == "missing":
            raise CheckpointError("model.safetensors: 'a.weight' is missing")
        if self.model == "bug":
            raise KeyError("a bug")
        if self.model == "exit":
            os._exit(3)
        if self.model == "never":
            time.sleep(600)
        if self.model == "chatty":
            os.write(int(sys.argv[-1]), b"\x00\x00\x00\x05hello")
        if self.model == "parent":
            fd = int(sys.argv[-1])
            self.child = subprocess.Popen(["sleep", "600"], pass_fds=(fd,))

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    @property
    def stats(self) -> StageStats:
        running = min(len(self.requests), self.places)
        return StageStats(
            running=running,
            waiting=len(self.requests) - running,
            steps=self.done,
            seconds={"denoise": self.done * 0.5},
            host_memory=5000 - 1000 * self.level,
            runs=[ComponentRuns("denoiser", "denoise", {1: self.runs}, Distribution([self.runs] + [0] * 15, 0.0))],
        )

    @property
    def busy(self) -> bool:
        return bool(self.requests or self.events)

    def warm_up(self) -> None:
        self.done += 2
        self.runs += 2

    def add(self, request: Request) -> None:
        if request.prompt == "picky":
            raise InvalidRequestError("height=8: only this engine knows why", param="height")
        if request.prompt == "odd":
            raise ZeroDivisionError("a bug in add")
        self.requests[request.request_id] = request
        self.steps[request.request_id] = 0

    def abort(self, request_id: str) -> None:
        self.parts.pop(request_id, None)
        if self.requests.pop(request_id, None):
            self.events.append(Failed(request_id, RequestAbortedError("aborted").info()))

    def taken(self, request_id: str) -> None:
        if request_id in self.parts:
            self._next_part(request_id)

    def _next_part(self, name: str) -> None:
        start = self.parts[name] = self.parts.get(name, -1) + 1
        if start < PARTS:
            rows = to_wire(np.full((1, 8, 8, 3), start, np.uint8))
            self.events.append(OutputChunk(name, 0, 0, (PARTS, 8, 8, 3), start, rows))
        else:
            del self.parts[name], self.requests[name]
            self.events.append(Finished(name, "video", [[]], [1], RequestMetrics(), fps=8.0))

    def step(self) -> list[Event]:
        for request in list(self.requests.values())[: self.places]:
            if request.request_id not in self.parts:
                self._advance(request)
        if self.requests:
            self.runs += 1
            time.sleep(STEP_S)
        events, self.events = self.events, []
        return events

    def sleep(self, level: int) -> int:
        assert not self.busy
        if self.model == "restless" or (self.model == "restless-second" and self.device == "auto:1"):
            raise ConfigError("its weights cannot be moved")
        if self.model == "coma":
            os.kill(os.getpid(), 9)
        if self.model == "slow":
            time.sleep(0.3)
        self.level = level
        return level * 1000

    def wake_up(self) -> None:
        tired, self.level = self.model == "tired" and self.level, 0
        if tired:
            raise CheckpointError("model.safetensors: gone")

    def close(self) -> None:
        if self.model == "deaf":
            time.sleep(600)

    def _advance(self, request: Request) -> None:
        name, total = request.request_id, request.params.num_inference_steps or 1
        if request.prompt == "crash":
            raise RuntimeError("device-side assert in /secret/path")
        if request.prompt == "die":
            os.kill(os.getpid(), 9)
        if request.prompt == "hang":
            time.sleep(600)
        if request.prompt is not None and request.prompt.startswith("touch "):
            Path(request.prompt.removeprefix("touch ")).touch()
        if request.prompt == "fail":
            del self.requests[name]
            self.events.append(Failed(name, GenerationError("did not work").info()))
            return
        self.steps[name] += 1
        self.done += 1
        self.events.append(Progress(name, "denoise", self.steps[name], total))
        if request.prompt == "parts":
            self._next_part(name)
            return
        if self.steps[name] == total:
            del self.requests[name]
            self.events.append(self._finished(request))

    def _finished(self, request: Request) -> Finished:
        params = request.params
        seed = params.seed or 0
        shape = (params.height or 16, params.width or 16, 3)
        pictures = []
        for i in range(params.num_outputs_per_prompt):
            array = np.full(shape, (seed + i) % 256, np.float32 if params.output_type == "latent" else np.uint8)
            pictures.append([to_wire(array if params.output_type == "latent" else _picture(array))])
        return Finished(
            request_id=request.request_id,
            modality="image",
            outputs=pictures,
            seeds=[seed + i for i in range(params.num_outputs_per_prompt)],
            metrics=RequestMetrics(steps=self.steps[request.request_id]),
        )


def _picture(array: np.ndarray):
    from PIL import Image

    return Image.fromarray(array)


if __name__ == "__main__":
    sys.exit(main(make_engine=FakeEngine))
