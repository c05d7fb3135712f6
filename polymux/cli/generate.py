"""`polymux generate`: pictures from one prompt, into files.

Everything that can be wrong without knowing the model is refused before the model is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import re
import sys
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from polymux.cli.flags import add_config, given, json_object
from polymux.config import EngineConfig, LimitsConfig
from polymux.errors import ConfigError, GenerationError, InvalidRequestError
from polymux.knobs import build
from polymux.media.image import ImageFormat, decode, encode, format_of
from polymux.omni import AsyncOmni
from polymux.omni_output import OmniRequestOutput
from polymux.prompts import OmniPrompt, request_of
from polymux.request import Capabilities, OmniDiffusionSamplingParams, Request
from polymux.validation import given_arguments, validate

HELP = "generate pictures from a prompt, into files"
USAGE = "polymux generate --model MODEL --prompt TEXT [flags]"

_REQUEST_ID = "cli"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_argument_group("Generation", "what to make")
    add = asked.add_argument
    add("--prompt", required=True, metavar="TEXT")
    add("-o", "--output", default="out.png", metavar="FILE", help=".png, .jpg, .jpeg or .webp (default: out.png); "
        "several pictures become out-0.png, out-1.png, ...")  # fmt: skip
    add("--image", action="append", default=[], metavar="FILE", help="input picture; may be given several times")
    add("--size", type=_size, metavar="WxH", help="pixels (default: the model's own)")
    add("--num-images", dest="num_outputs_per_prompt", type=int, default=1, metavar="N", help="picture i is the one "
        "of seed + i (default: 1)")  # fmt: skip
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
    add("--extra-args", type=json_object, default={}, metavar="JSON", help="further arguments of the model's pipeline")
    add_config(parser, EngineConfig)


def run(arguments: argparse.Namespace) -> int:
    values = given(arguments, EngineConfig)
    if "model" not in values:
        raise ConfigError("no model is given: name one, for example: --model demo")
    config = build(EngineConfig, values)
    target, format = Path(arguments.output), format_of(arguments.output)
    if target.is_dir():
        raise ConfigError(f"{str(target)!r} is a folder", param="output")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {str(target.parent)!r}", param="output")
    prompt, params = _prompt(arguments, config.limits), sampling_params(arguments)
    check_without_model(request_of(prompt, params, _REQUEST_ID), config.limits)
    output = asyncio.run(_generate(config, prompt, params))
    _write(output, target, format)
    return 0


def sampling_params(arguments: argparse.Namespace) -> OmniDiffusionSamplingParams:
    """What the command line says about how to generate."""
    names = {f.name for f in dataclasses.fields(OmniDiffusionSamplingParams)}
    values = {name: value for name, value in vars(arguments).items() if name in names}
    width, height = arguments.size or (None, None)
    return OmniDiffusionSamplingParams(width=width, height=height, **values)


def check_without_model(request: Request, limits: LimitsConfig) -> None:
    """Raises InvalidRequestError for what no model could take. Which arguments the model takes is not known yet."""
    arguments = tuple(given_arguments(request))
    media = {name: len(items) for name, items in request.media.items()}
    takes_all = Capabilities(
        family=None, pipeline="the pipeline", modality="image", arguments=arguments, required=(), media=media
    )
    validate(request, takes_all, limits)


def _prompt(arguments: argparse.Namespace, limits: LimitsConfig) -> OmniPrompt:
    prompt: OmniPrompt = {"prompt": arguments.prompt}
    if arguments.image:
        pictures = [_read(path, limits.max_generated_image_size) for path in arguments.image]
        prompt["multi_modal_data"] = {"image": pictures}
    return prompt


def _read(path: str, max_pixels: int) -> Image.Image:
    try:
        return decode(Path(path).read_bytes(), max_pixels=max_pixels)
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}", param="image") from None
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error.message}", param="image") from None


async def _generate(config: EngineConfig, prompt: OmniPrompt, params: OmniDiffusionSamplingParams) -> OmniRequestOutput:
    async with AsyncOmni.from_config(config) as omni:
        if omni.capabilities is not None and omni.capabilities.modality != "image":
            raise InvalidRequestError(f"{config.model.model} makes {omni.capabilities.modality}, not pictures")
        with tqdm(desc="denoise", unit="step", file=sys.stderr) as bar:
            async with contextlib.aclosing(omni.generate(prompt, params, request_id=_REQUEST_ID)) as events:
                async for event in events:
                    if isinstance(event, OmniRequestOutput):
                        bar.update((bar.total or bar.n) - bar.n)  # the last step is reported as the output
                        return event
                    if event.phase == "denoise":
                        bar.total = event.total or None
                        bar.update(event.step - bar.n)
    raise GenerationError("the generation ended without an output")


def _write(output: OmniRequestOutput, target: Path, format: ImageFormat) -> None:
    several = len(output.images) > 1
    for i, image in enumerate(output.images):
        path = target.with_stem(f"{target.stem}-{i}") if several else target
        assert isinstance(image, Image.Image)
        try:
            path.write_bytes(encode(image, format))
        except OSError as error:
            raise GenerationError(f"{path} cannot be written: {error.strerror}") from None
        print(path)
    print(f"seed: {', '.join(str(seed) for seed in output.seeds)}", file=sys.stderr)


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be WIDTHxHEIGHT in pixels, such as 512x512")
    return int(match[1]), int(match[2])


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers with commas between them") from None
