"""`polymux generate`: pictures, videos or sound from one prompt, into files; or text, which is printed.

Everything that can be wrong without knowing the model is refused before the model is loaded, and what depends on its
kind too, where that can be told; the rest when it is loaded, before it computes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import re
import sys
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from polymux import logs
from polymux.cli.flags import add_config, given, json_object
from polymux.cli.input_files import FLAGS, InputFile, media_for, read
from polymux.cli.known_modality import known_modality
from polymux.cli.output_files import Target, write
from polymux.config import EngineConfig, LimitsConfig
from polymux.errors import ConfigError, GenerationError, InvalidRequestError
from polymux.knobs import build
from polymux.media.video import frames_for
from polymux.omni import AsyncOmni
from polymux.omni_output import OmniRequestOutput
from polymux.profile import lines_of
from polymux.prompts import OmniPrompt, Params, request_of
from polymux.request import Capabilities, OmniDiffusionSamplingParams, Progress, Request, SamplingParams
from polymux.sampling import sampling_of
from polymux.validation import given_arguments, validate

HELP = "generate pictures, videos or sound from a prompt, into files, or text"
USAGE = "polymux generate --model MODEL --prompt TEXT [flags]"

QUIET = "warning"  # what went wrong is one line, and that is the last one
_REQUEST_ID = "cli"
_WRITING = ("max_new_tokens", "temperature")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_argument_group("Generation", "what to make")
    add = asked.add_argument
    add("--prompt", required=True, metavar="TEXT")
    add("-o", "--output", metavar="FILE", help="default: out.png, out.mp4 or out.wav, by what the model makes; others: "
        ".jpg .webp .webm .gif .flac .mp3 .opus .pcm; several become out-0.png, out-1.png, ...")  # fmt: skip
    _add_media(asked)
    add("--size", type=_size, metavar="WxH", help="pixels (default: the model's own)")
    add("--num-frames", type=int, metavar="N", help="of a video (default: the model's own)")
    add("--fps", type=float, metavar="X", help="frames per second of a video; of the file alone, if the model is not "
        "conditioned on it (default: the model's own)")  # fmt: skip
    add("--seconds", "--audio-end-in-s", dest="seconds", type=float, metavar="X", help="of sound; of a video: as many "
        "frames as are needed (default: the model's own)")  # fmt: skip
    add("--num-images", "--num-outputs", dest="num_outputs_per_prompt", type=int, default=1, metavar="N", help="output "
        "i is the one of seed + i (default: 1)")  # fmt: skip
    add("--seed", type=int, metavar="N", help="default: drawn, and printed")
    add("--steps", "--num-inference-steps", dest="num_inference_steps", type=int, metavar="N")
    add("--guidance-scale", type=float, metavar="X")
    add("--guidance-scale-2", type=float, metavar="X", help="of the low-noise denoiser, where there are two")
    add("--true-cfg-scale", type=float, metavar="X")
    add("--negative-prompt", metavar="TEXT")
    add("--strength", type=float, metavar="X", help="0 to 1: how far an input picture is changed")
    add("--sigmas", type=_numbers, metavar="X,X,...", help="noise levels, one per step")
    add("--timesteps", type=_numbers, metavar="X,X,...", help="timesteps, one per step")
    add("--max-sequence-length", type=int, metavar="N", help="tokens of the prompt")
    _add_interpolation(asked)
    add("--max-new-tokens", type=int, metavar="N", help="of models that write tokens (default: the model's own)")
    add("--temperature", type=float, metavar="X", help="likewise; 0: the likeliest tokens")
    add("--profile", action="store_true", help="say where the time went, on stderr")
    add("--extra-args", type=json_object, default={}, metavar="JSON", help="further arguments of the model's pipeline")
    add_config(parser, EngineConfig)


def _add_media(asked: argparse._ArgumentGroup) -> None:
    for name, text in FLAGS.items():
        asked.add_argument(f"--{name.replace('_', '-')}", action="append", default=[], metavar="FILE", help=text)
    asked.add_argument("--media", action="append", default=[], type=_named, metavar="NAME=FILE", help="input for the "
        "argument of the model's pipeline that has this name; may be given several times")  # fmt: skip


def _add_interpolation(asked: argparse._ArgumentGroup) -> None:
    add = asked.add_argument
    add("--enable-frame-interpolation", action="store_true", help="put frames between the frames of a video; needs "
        "--frame-interpolation-model-path")  # fmt: skip
    add("--frame-interpolation-exp", type=int, default=1, metavar="N", help="n frames become (n - 1) * 2^N + 1, at 2^N "
        "times the rate (default: 1)")  # fmt: skip
    add("--frame-interpolation-scale", type=float, default=1.0, metavar="X", help="of the frames, where motion is "
        "estimated: 0.25, 0.5, 1, 2 or 4 (default: 1)")  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What the command line asks for."""

    config: EngineConfig
    prompt: str
    files: list[InputFile]
    params: OmniDiffusionSamplingParams
    target: Target
    writing: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of SamplingParams alone

    def for_model(self, can: Capabilities) -> tuple[OmniPrompt, Params]:
        """In the words of the loaded model. Raises InvalidRequestError."""
        text = can.answers is not None and (bool(self.writing) or self.target.is_text)
        can = can.answers if can.answers is not None and text else can
        self.target.check(can.modality, self.config.model.model)
        if can.modality == "video":
            self.target.check_fps(self.fps(can.fps))
        prompt: OmniPrompt = {"prompt": self.prompt, "modalities": ["text"]} if text else {"prompt": self.prompt}
        if self.files:
            prompt["multi_modal_data"] = dict(media_for(self.files, can))
        params = _params_for(self.params, can)
        return prompt, _written(params, self.writing, can) if self.writing else params

    def fps(self, own: float | None) -> float | None:
        """Of the file; `own` is how many the model makes of itself."""
        made = self.params.fps or own
        return None if made is None else made * self.params.frame_factor


def run(arguments: argparse.Namespace) -> int:
    values = given(arguments, EngineConfig)
    if "model" not in values:
        raise ConfigError("no model is given: name one, for example: --model demo")
    config = build(EngineConfig, {"log_level": QUIET} | values)
    logs.configure(config.log)
    target, params = Target.of(arguments.output), sampling_params(arguments)
    check_without_model(request_of(arguments.prompt, params, _REQUEST_ID), config)
    if params.seconds is not None and params.num_frames is not None:
        raise InvalidRequestError("it says the same as --num-frames: give one of them", param="seconds")
    modality = known_modality(config.model)
    if modality is not None:
        target.check(modality, config.model.model)
    if modality == "video" and params.fps is not None:
        target.check_fps(params.fps * params.frame_factor)
    files = _files(arguments, config.limits)
    task = Task(config, arguments.prompt, files, params, target, writing_params(arguments))
    output, fps = asyncio.run(_generate(task))
    for path in write(output, target, fps):
        print(path)
    print(f"seed: {', '.join(str(seed) for seed in output.seeds)}", file=sys.stderr)
    for line in lines_of(output.profile) if output.profile is not None else ():
        print(line, file=sys.stderr)
    return 0


def sampling_params(arguments: argparse.Namespace) -> OmniDiffusionSamplingParams:
    """What the command line says about how to generate."""
    names = {f.name for f in dataclasses.fields(OmniDiffusionSamplingParams)}
    values = {name: value for name, value in vars(arguments).items() if name in names}
    width, height = arguments.size or (None, None)
    return OmniDiffusionSamplingParams(width=width, height=height, **values)


def writing_params(arguments: argparse.Namespace) -> dict[str, Any]:
    """What it says to models that write tokens alone."""
    return {name: value for name in _WRITING if (value := getattr(arguments, name)) is not None}


def check_without_model(request: Request, config: EngineConfig) -> None:
    """Raises InvalidRequestError for what no model could take. Which arguments the model takes is not known yet."""
    takes_all = Capabilities(
        family=None,
        pipeline="the pipeline",
        modality="video" if request.params.enable_frame_interpolation else "image",
        arguments=tuple(given_arguments(request)),
        required=(),
        media={},
        frame_interpolation=config.model.frame_interpolation_model_path is not None,
    )
    validate(request, takes_all, config.limits)


def _files(arguments: argparse.Namespace, limits: LimitsConfig) -> list[InputFile]:
    files = [read(name, path, limits) for name in FLAGS for path in getattr(arguments, name)]
    return files + [read(name, path, limits, exact=True) for name, path in arguments.media]


def _params_for(params: OmniDiffusionSamplingParams, can: Capabilities) -> OmniDiffusionSamplingParams:
    """Seconds of a video become frames; frames per second that the model knows nothing of are for the file alone."""
    fps = params.fps or can.fps
    if params.fps is not None and can.modality == "video" and "fps" not in can.arguments:
        params = dataclasses.replace(params, fps=None)
    if params.seconds is not None and can.modality == "video":
        if fps is None:
            raise InvalidRequestError("the model does not say how many frames per second it makes", param="fps")
        frames = frames_for(params.seconds, fps, can.frames_multiple)
        params = dataclasses.replace(params, seconds=None, num_frames=frames)
    return params


def _written(params: OmniDiffusionSamplingParams, writing: dict[str, Any], can: Capabilities) -> SamplingParams:
    """For a model that writes tokens. Raises InvalidRequestError if it does not."""
    if not can.samples:
        name = next(iter(writing))
        raise InvalidRequestError(f"{can.pipeline} does not write tokens", param=name)
    return dataclasses.replace(sampling_of(Request(request_id=_REQUEST_ID, params=params), can), **writing)


async def _generate(task: Task) -> tuple[OmniRequestOutput, float | None]:
    """The output, and the frames per second of its videos."""
    async with AsyncOmni.from_config(task.config) as omni:
        assert omni.capabilities is not None  # it is ready
        prompt, params = task.for_model(omni.capabilities)
        with tqdm(desc="denoise", unit="step", file=sys.stderr, disable=omni.capabilities.chats) as bar:
            async with contextlib.aclosing(omni.generate(prompt, params, request_id=_REQUEST_ID)) as events:
                async for event in events:
                    if isinstance(event, OmniRequestOutput):
                        bar.update((bar.total or bar.n) - bar.n)  # the last step is reported as the output
                        return event, task.fps(omni.capabilities.fps)
                    if isinstance(event, Progress) and event.phase == "denoise":
                        bar.total = event.total or None
                        bar.update(event.step - bar.n)
    raise GenerationError("the generation ended without an output")


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be WIDTHxHEIGHT in pixels, such as 512x512")
    return int(match[1]), int(match[2])


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name.isidentifier() and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=FILE, such as image=cat.png")
    return name, path


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers with commas between them") from None
