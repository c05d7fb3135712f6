"""`polymux speak`: a text becomes speech, in a file.

Everything that can be wrong without knowing the model is refused before the model is loaded; the rest when it is
loaded, before it computes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
from pathlib import Path

from tqdm import tqdm

from polymux import logs
from polymux.cli.flags import add_config, given, json_object
from polymux.cli.input_files import read
from polymux.cli.known_modality import known_modality
from polymux.cli.output_files import Target, write
from polymux.config import EngineConfig
from polymux.errors import ConfigError, GenerationError, InvalidRequestError
from polymux.knobs import build
from polymux.omni import AsyncOmni
from polymux.omni_output import OmniRequestOutput
from polymux.request import Progress, SamplingParams

HELP = "speak a text, into a file"
USAGE = 'polymux speak "TEXT" --model MODEL [-o out.wav] [flags]'

QUIET = "warning"  # what went wrong is one line, and that is the last one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_argument_group("Speech", "what to say, and how")
    add = asked.add_argument
    add("text", metavar="TEXT", help="what to say; -: what comes on standard input")
    add("-o", "--output", default="out.wav", metavar="FILE", help="ends in .wav, .flac, .mp3, .opus, .ogg or .pcm "
        "(default: out.wav)")  # fmt: skip
    add("--voice", metavar="NAME", help="one of the model's; a wrong one prints them (default: the model's first)")
    add("--ref-audio", metavar="FILE", help="a recording of the voice to speak with, for models that take it")
    add("--ref-text", metavar="TEXT", help="what is said in it")
    add("--language", metavar="NAME", help="for models that take one")
    add("--instructions", metavar="TEXT", help="how to speak, for models that take it")
    add("--speed", type=float, metavar="X", help="0.25 to 4 (default: 1)")
    add("--seed", type=int, metavar="N", help="default: drawn, and printed")
    add(
        "--do-sample", action=argparse.BooleanOptionalAction, help="draw tokens, in place of the likeliest ones, or not"
    )
    add(
        "--temperature",
        type=float,
        metavar="X",
        help="of the tokens that are drawn; 0: none are (default: the model's)",
    )
    add("--top-k", type=int, metavar="N")
    add("--top-p", type=float, metavar="X")
    add("--repetition-penalty", type=float, metavar="X")
    add("--guidance-scale", type=float, metavar="X", help="where the model has guidance")
    add("--max-new-tokens", type=int, metavar="N", help="of each sentence, which is cut there")
    add("--extra-args", type=json_object, default={}, metavar="JSON", help="further arguments of the model's own")
    add_config(parser, EngineConfig)


def run(arguments: argparse.Namespace) -> int:
    values = given(arguments, EngineConfig)
    if "model" not in values:
        raise ConfigError("no model is given: name one with --model")
    config = build(EngineConfig, {"log_level": QUIET} | values)
    logs.configure(config.log)
    target = Target.of(arguments.output)
    target.check("audio", "polymux speak")
    modality = known_modality(config.model)
    if modality not in (None, "audio"):
        raise InvalidRequestError(f"{config.model.model} does not speak", param="model")
    text = sys.stdin.read() if arguments.text == "-" else arguments.text
    if not text.strip():
        raise InvalidRequestError("there is nothing to say", param="text")
    if arguments.ref_audio is not None:
        arguments.ref_audio = read("audio", arguments.ref_audio, config.limits).medium
    output = asyncio.run(_speak(config, text, _params(arguments)))
    for path in write(output, Target(Path(arguments.output)), None):
        print(path)
    print(f"seed: {output.seeds[0]}", file=sys.stderr)
    return 0


def _params(arguments: argparse.Namespace) -> SamplingParams:
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in vars(arguments).items() if name in names})


async def _speak(config: EngineConfig, text: str, params: SamplingParams) -> OmniRequestOutput:
    async with AsyncOmni.from_config(config) as omni:
        can = omni.capabilities
        assert can is not None  # it is ready
        if not can.voices or can.chats:
            raise InvalidRequestError(f"{can.pipeline} does not speak; polymux generate makes its {can.modality}")
        with tqdm(desc="speak", unit="step", file=sys.stderr) as bar:
            async with contextlib.aclosing(omni.generate(text, params)) as events:
                async for event in events:
                    if isinstance(event, OmniRequestOutput):
                        return event
                    if isinstance(event, Progress):
                        bar.update(event.step - bar.n)
    raise GenerationError("the generation ended without an output")
