"""Which settings cannot act on a model of a family: told by what is declared, before anything is loaded.

What only the loaded model can tell (whether it has the layers that a setting is for) is refused where it is loaded.
"""

from __future__ import annotations

from polymux.config import EngineConfig
from polymux.errors import ConfigError
from polymux.families import family_of
from polymux.families.base import UNKNOWN, Family
from polymux.families.chat import ChatFamily
from polymux.families.features import features_by_pipeline
from polymux.families.generate import GenerateFamily
from polymux.knobs import check_unchanged

# Of the model's group: what acts on pipelines of diffusers only.
_OF_PIPELINES = (
    "load_format",
    "num_weight_load_threads",
    "enable_multithread_weight_load",
    "model_class_name",
    "diffusers_call_kwargs",
    "frame_interpolation_model_path",
)
# Of decoding: what acts on prompts and answers of text only.
_OF_ANSWERS = ("max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill", "tool_call_parser")


def check_settings(config: EngineConfig, family: GenerateFamily | None) -> None:
    """Raises ConfigError for a setting that cannot act on a model of this family; None: on a pipeline of diffusers."""
    if family is None:
        config.speech.check_unused()
        check_unchanged(config.scheduler, "acts only on models of transformers", ("merge_decoding",))
        check_unchanged(config.decoding, "acts only on models whose answers go on together")
        return
    answers = isinstance(family, ChatFamily) and bool(family.paged)
    if config.decoding.elsewhere and answers:
        return  # what acts is for that engine to say
    why = f"acts only on pipelines of diffusers, and {family.name} is a model of transformers"
    for group in (
        config.memory,
        config.adapters,
        config.attention,
        config.compilation,
        config.quantization,
        config.caches,
    ):
        check_unchanged(group, why)
    if not answers:  # else see `divisible`
        check_unchanged(config.parallel, why)
    check_unchanged(config.model, why, _OF_PIPELINES)
    check_unchanged(config.scheduler, why, ("max_batched_tokens",))
    if not (family.merge or (isinstance(family, ChatFamily) and family.decoders_merged)):
        why = f"acts only on models that answer, and on a few that speak; on {family.name} it does not"
        check_unchanged(config.scheduler, why, ("merge_decoding",))
    if family.framed and not answers:
        check_unchanged(config.decoding, f"acts only on models that answer, and {family.name} is none", _OF_ANSWERS)
        if config.decoding.elsewhere:
            raise ConfigError(f"decoding='vllm': runs language models, and {family.name} is none", param="decoding")
    elif not answers:
        why = f"acts only on models whose answers go on together, and {family.name} is none"
        check_unchanged(config.decoding, why)
    if config.speech.vocoder is not None and family.beside is None:
        raise ConfigError(f"vocoder: a {family.name} model has its own", param="vocoder")
    if config.speech.voice_path is not None and not family.voice_files:
        raise ConfigError(f"voice_path: the voices of {family.name} are its own", param="voice_path")


def check_pipeline(config: EngineConfig, pipeline: str) -> None:
    """Raises ConfigError for a setting that cannot act on pipelines of this class of diffusers, if it is declared."""
    check_settings(config, None)
    family, chosen = family_of(pipeline), config.caches.cache_backend
    if family is UNKNOWN:
        return
    if chosen != "none" and chosen not in family.step_caches.backends:
        raise ConfigError(f"--cache-backend {chosen}: {not_validated(family)}", param="cache_backend")
    if config.adapters.lora_path and "lora" not in features_by_pipeline().get(pipeline, ("lora",)):
        raise ConfigError(f"--lora-path: {pipeline} takes no LoRA", param="lora_path")


def not_validated(family: Family) -> str:
    """Of a cache of denoising steps, and those that are."""
    known = family.step_caches.backends
    return f"it is not validated for the family {family.name}; " + (
        f"those are: {', '.join(known)}" if known else "no cache backend is"
    )
