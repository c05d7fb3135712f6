"""What a loaded model that answers takes and makes."""

from __future__ import annotations

from msgspec.structs import replace

from polymux.config import EngineConfig
from polymux.engine.constraint import can_constrain
from polymux.engine.generate_model import GenerateModel, not_profiled
from polymux.errors import ConfigError
from polymux.families.chat import ChatFamily
from polymux.families.generate import Parts
from polymux.request import Capabilities
from polymux.tools import CallFormat


def described(model: GenerateModel, config: EngineConfig) -> Capabilities:
    """For a model of a `ChatFamily`."""
    assert isinstance(model.family, ChatFamily)
    return answering(model.describe(config), model.family, model.parts, config, can_constrain())


def answering(
    known: Capabilities, family: ChatFamily, parts: Parts, config: EngineConfig, constrains: bool
) -> Capabilities:
    """`known`: what it takes and makes, but for answers. `constrains`: they can be held to JSON and calls."""
    adapter = family.adapter
    makes = adapter.makes(parts)
    speaks = "audio" in makes
    arguments = tuple(name for name in family.arguments if speaks or name != "voice")
    extra = tuple(name for name in family.extra if adapter.knows(parts, name))
    refused = {"partial_images": "there are none of text"} | not_profiled(config)
    if not constrains:
        arguments = tuple(name for name in arguments if name != "json_schema")
        refused["json_schema"] = "the server lacks the package xgrammar, which polymux[structured] installs"
    return replace(
        known,
        arguments=("prompt", *arguments, *extra),
        extra=extra,
        voices=adapter.voices(parts),
        media=dict(family.takes),
        refused=refused,
        tool_calls=_tool_calls(family, parts, config),
        sample_rate=adapter.sample_rate(parts) if speaks else None,
        chats=True,
        merges=config.scheduler.merge_decoding,
        makes=makes,
        context=adapter.context(parts),
        hears_at=adapter.hears_at(parts) if any(kind == "audio" for kind, _ in family.takes) else None,
        sees_at=family.sees_at,
    )


def _tool_calls(family: ChatFamily, parts: Parts, config: EngineConfig) -> CallFormat | None:
    """How it writes calls: as the configuration says, or else its template. Raises ConfigError if it takes none."""
    adapter, chosen = family.adapter, config.decoding.tool_call_parser
    if chosen is not None and not adapter.takes_tools(parts):
        what = f"tool_call_parser={chosen!r}: the checkpoint's chat template shows no tools to the model"
        raise ConfigError(what, param="tool_call_parser")
    return adapter.tool_calls(parts) if chosen is None else chosen  # type: ignore[return-value]  # a choice
