"""From a request to the arguments of a pipeline's call.

Knows how diffusers' pipelines, classic and modular, name their arguments; knows no particular pipeline.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.loaders.lora_base import LoraBaseMixin

from polymux.diffusion.features import features_in
from polymux.diffusion.media_arguments import RATES, SOUNDS, media_arguments
from polymux.diffusion.outputs import OUTPUTS
from polymux.diffusion.preview import no_previews
from polymux.diffusion.rates import UNKNOWN_SOUND, SoundShape, fps_of
from polymux.errors import InvalidRequestError
from polymux.families import family_of
from polymux.families.base import UNKNOWN, Family
from polymux.quantization.layer import weight_count
from polymux.quantization.quantizer import formats_in
from polymux.request import Capabilities, Modality, OmniDiffusionSamplingParams, Request
from polymux.spelling import shown

# Sampling fields and the names under which pipelines take them, in order of preference.
FIELDS: dict[str, tuple[str, ...]] = {
    "height": ("height",),
    "width": ("width",),
    "num_frames": ("num_frames",),
    "fps": ("fps", "frame_rate"),
    "seconds": ("seconds", "audio_end_in_s", "audio_duration", "audio_duration_s"),
    "num_inference_steps": ("num_inference_steps",),
    "guidance_scale": ("guidance_scale",),
    "guidance_scale_2": ("guidance_scale_2",),
    "true_cfg_scale": ("true_cfg_scale",),
    "strength": ("strength",),
    "sigmas": ("sigmas",),
    "timesteps": ("timesteps",),
    "max_sequence_length": ("max_sequence_length",),
}

# Arguments that take media, and how many items each may take, unless the family says otherwise.
MANY = 16
MEDIA: dict[str, int] = {
    "image": MANY,
    "images": MANY,
    "input_images": MANY,
    "mask_image": 1,
    "control_image": MANY,
    "reference_images": MANY,
    "last_image": 1,
    "image_reference": 1,
    "video": 1,
    "mask": 1,
    "audio": 1,
    "conditioning_image": 1,
} | dict.fromkeys(SOUNDS, 1)

# Set by the engine, or of a kind that a request cannot carry (tensors, functions).
OWN = {
    "generator",
    "output_type",
    "return_dict",
    "output",
    "state",
    "latents",
    "audio_latents",
    "attention_mask",  # of prompt_embeds
    *("prior_token_ids", "prior_token_image_ids", "source_image_grid_thw"),  # likewise made of the prompt
    *RATES.values(),
}
OWN_ENDINGS = ("_embeds", "_embeds_mask", "_embeddings", "_attention_mask", "_latents", "_kwargs", "_per_prompt")
OWN_BEGINNINGS = (
    "callback",
    "ip_adapter",
    "negative_ip_adapter",
    "prompt_embeds",
    "negative_prompt_embeds",
    "pooled_prompt",
    "negative_pooled",
)
REPLAY_STEPS = 2  # some pipelines give a single step another meaning

SHAPES = ("height", "width", "num_frames")  # whose defaults are told


@dataclass(frozen=True)
class CallShape:
    """The arguments that a pipeline's call takes, and which of them have no default."""

    accepted: tuple[str, ...]
    required: tuple[str, ...]
    modular: bool
    results: tuple[str, ...] = ()  # modular: the names of the wanted outputs
    defaults: dict[str, int] = dataclasses.field(default_factory=dict)  # that are integers

    @classmethod
    def of(cls, pipeline: Any, modality: Modality) -> CallShape:
        blocks = pipeline.__dict__.get("_blocks")
        if blocks is not None:
            inputs = [p for p in blocks.inputs if p.name is not None]
            names = {p.name for p in blocks.outputs}
            wanted = OUTPUTS[modality] + (OUTPUTS["audio"] if modality == "video" else ())
            made = {p.name for p in blocks.intermediate_outputs}  # by a block, for a later one
            required = tuple(p.name for p in inputs if p.required and p.name not in made)
            results = tuple(n for n in wanted if n in names)
            defaults = _integers((p.name, p.default) for p in inputs)
            return cls(tuple(p.name for p in inputs), required, True, results, defaults)
        parameters = inspect.signature(type(pipeline).__call__).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        # Pipelines give None as the default of what they cannot do without.
        required = tuple(p.name for p in named if p.default is inspect.Parameter.empty)
        defaults = _integers((p.name, p.default) for p in named)
        return cls(tuple(p.name for p in named), required, False, defaults=defaults)

    def takes(self, name: str) -> bool:
        return name in self.accepted


def _integers(defaults: Iterable[tuple[str, Any]]) -> dict[str, int]:
    return {name: value for name, value in defaults if type(value) is int}


def describe(pipeline: Any, family: Family, shape: CallShape) -> Capabilities:
    """What the loaded pipeline can do."""
    parts = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    weights = [p for module in parts.values() for p in module.parameters()]
    refused = _refused(pipeline, family, shape)
    media = {n: MEDIA[n] for n in shape.accepted if n in MEDIA} | dict(family.media + family.optional_media)
    media = {name: most for name, most in media.items() if name not in refused}
    there = {name for name, part in pipeline.components.items() if part is not None}
    needed = [n for n, component, flag in family.needed if component in there and _holds(pipeline, component, flag)]
    prompt = ("prompt",) if shape.takes("prompt") and not family.prompt_optional else ()
    requests = {field for field, names in FIELDS.items() if any(shape.takes(n) for n in names)}
    others = [
        n
        for n in shape.accepted
        if is_for_requests(n) and n != family.area and not any(n in names for names in FIELDS.values())
    ]
    return Capabilities(
        family=family.name if family.pipelines else None,
        pipeline=type(pipeline).__name__,
        modality=family.modality,
        arguments=tuple(sorted({*requests, *others, *(["output_type"] if shape.takes("output_type") else [])})),
        required=tuple(sorted({*shape.required, *prompt, *needed, *(n for n, _ in family.media)})),
        media=media,
        size_multiple=family.size_multiple or _size_multiple(pipeline),
        min_inference_steps=_min_steps(pipeline),
        frames_multiple=family.frames_multiple,
        max_seconds=getattr(pipeline, family.longest) if family.longest is not None else None,
        defaults={name: value for name, value in shape.defaults.items() if name in SHAPES} | _own_size(family),
        fps=fps_of(pipeline, family),
        sample_rate=SoundShape.of(pipeline).sample_rate,
        refused=refused,
        previews="partial_images" not in refused,
        alpha=family.alpha,
        picture_sized=family.picture_sized,
        picture_mark=family.picture_mark,
        variations=family.variations,
        merges="denoiser" in family.merge,
        lora=isinstance(pipeline, LoraBaseMixin),
        device=str(next((p.device for p in weights), "cpu")),
        dtype=str(next((p.dtype for p in weights if p.is_floating_point()), "")).removeprefix("torch."),
        parameters=sum(map(weight_count, parts.values())),
        features=features_in(pipeline, family, "partial_images" not in refused),
        quantized={n: " and ".join(kinds) for n, m in parts.items() if (kinds := formats_in(m))},
    )


def _own_size(family: Family) -> dict[str, int]:
    return {} if family.size is None else dict(zip(("width", "height"), family.size, strict=True))


def _refused(pipeline: Any, family: Family, shape: CallShape) -> dict[str, str]:
    """What this checkpoint would ignore, or cannot do, although its pipeline takes it, and why."""
    refused: dict[str, str] = {}
    for argument, component, flag in family.refused:
        if not _holds(pipeline, component, flag):
            refused[argument] = f"this checkpoint{_lack(component, flag)}"
    refused |= {argument: why for argument, why in family.ignored if shape.takes(argument)}
    # Such pipelines hand eta on to schedulers that take it, and drop it without a word where they do not.
    step = getattr(pipeline.components.get("scheduler"), "step", None)
    names = () if step is None else inspect.signature(step).parameters
    if shape.takes("eta") and hasattr(pipeline, "prepare_extra_step_kwargs") and "eta" not in names:
        refused["eta"] = "this checkpoint's scheduler takes none"
    hindrance = no_previews(pipeline, family)
    if hindrance is not None:
        refused["partial_images"] = hindrance
    return refused


def _holds(pipeline: Any, component: str, condition: str) -> bool:
    """Whether a component's config has one of the flags of a condition, as `Family.refused` writes it."""
    part = pipeline if component == "" else pipeline.components.get(component)
    if part is None or condition == "":
        return part is not None or condition != ""  # what is not there ignores nothing
    flags = condition.split(" or ")
    return any(bool(part.config.get(flag.removeprefix("not "))) != flag.startswith("not ") for flag in flags)


def _lack(component: str, condition: str) -> str:
    """A condition that does not hold, in words."""
    if condition == "":
        return f" has no {component}"
    flags = [flag.removeprefix("not ") if "not " in flag else f"no {flag}" for flag in condition.split(" or ")]
    return f"'s {component or 'pipeline'} has {', but '.join(flags)}"


def _min_steps(pipeline: Any) -> int:
    """A schedule that is stretched to end at a given noise level has a beginning and an end: of one step it is NaN."""
    config = getattr(pipeline.components.get("scheduler"), "config", {})
    return 2 if config.get("shift_terminal") else 1


def _size_multiple(pipeline: Any) -> int:
    """Pixels per latent, times the denoiser's patch where it has one."""
    scale = getattr(pipeline, "vae_scale_factor", None) or getattr(pipeline, "vae_scale_factor_spatial", None) or 8
    return int(scale) * 2 if "transformer" in pipeline.components else int(scale)


def is_for_requests(name: str) -> bool:
    """Whether a request may set this argument of a pipeline's call."""
    return name not in OWN and not name.endswith(OWN_ENDINGS) and not name.startswith(OWN_BEGINNINGS)


def declared_family(pipeline: Any) -> Family:
    """The pipeline's family; of an unknown one, what it makes is told by its arguments."""
    family = family_of(type(pipeline).__name__)
    if family is not UNKNOWN:
        return family
    accepted = CallShape.of(pipeline, "image").accepted
    sound: Modality = "audio" if any(n.startswith("audio_") for n in accepted) else "image"
    return replace(UNKNOWN, modality="video" if {"num_frames", "video"} & {*accepted} else sound)


def call_arguments(
    request: Request, shape: CallShape, family: Family, sound: SoundShape = UNKNOWN_SOUND
) -> dict[str, Any]:
    """The pipeline's keyword arguments, without generator. `sound`: what the pipeline takes."""
    params = request.params
    values: dict[str, Any] = dict(_own_size(family))
    if request.prompt is not None:
        values["prompt"] = request.prompt
    negative = request.negative_prompt if request.negative_prompt is not None else params.negative_prompt
    if negative is not None:
        values["negative_prompt"] = negative
    for field, names in FIELDS.items():
        value = getattr(params, field)
        if value is not None:
            name = next((n for n in names if shape.takes(n)), field)
            values[name] = list(value) if isinstance(value, tuple) else value
    if family.area is not None and params.height is not None and params.width is not None:
        values[family.area] = params.height * params.width
    values |= media_arguments(request.media, family, sound)
    for name, value in params.extra_args.items():
        if name in values:
            raise InvalidRequestError(f"extra_args.{name} is also given as a field of its own", param=name)
        values[name] = value
    for argument, companion, default in family.companions:
        if argument in values and companion not in values:
            if default is None:
                raise InvalidRequestError(
                    f"{argument} acts only together with {companion}, which is missing", param=companion
                )
            values[companion] = default
    for argument, ruler in family.overruled:
        if argument in values and ruler in values:
            field = next((field for field, names in FIELDS.items() if argument in names), argument)
            raise InvalidRequestError(f"{field} cannot be combined with {ruler}, which decides it", param=field)
    _refuse_unknown(values, shape)
    output = _output_type(params, family)
    if shape.takes("output_type"):
        values["output_type"] = output
    elif params.output_type != "pil":
        raise InvalidRequestError(
            f"output_type={shown(params.output_type)}: this pipeline has one kind of output", param="output_type"
        )
    if shape.modular:
        values["output"] = list(shape.results)
    return values


def replay_arguments(arguments: dict[str, Any], shape: CallShape) -> dict[str, Any]:
    """The arguments for a call whose results do not matter until its last step: as few steps as will do, a picture."""
    changes: dict[str, Any] = {"output_type": "pil"} if shape.takes("output_type") else {}
    if shape.takes("num_inference_steps") and not shape.takes("strength"):  # which leaves out a share of the steps
        schedules = {n: arguments[n][-REPLAY_STEPS:] for n in ("sigmas", "timesteps") if arguments.get(n) is not None}
        changes |= schedules
        changes["num_inference_steps"] = min([REPLAY_STEPS, *map(len, schedules.values())])
    return arguments | changes


def _output_type(params: OmniDiffusionSamplingParams, family: Family) -> str:
    if params.output_type != "pil" or family.modality == "image":
        return params.output_type
    # As tensors, frames stay on the device until they are bytes. What a pipeline of no family means by it is unknown.
    return "pt" if family.modality == "video" and family.pipelines else "np"


def _refuse_unknown(values: dict[str, Any], shape: CallShape) -> None:
    allowed = [n for n in shape.accepted if is_for_requests(n)]
    for name in values:
        if name not in allowed and name not in RATES.values():
            raise InvalidRequestError(
                f"{name}={shown(values[name])}: this pipeline takes no {name}; it takes {', '.join(sorted(allowed))}",
                param=name,
            )
