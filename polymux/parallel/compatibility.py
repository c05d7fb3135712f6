"""Which ways of using several ranks go together, and with what else, as data; the table in the documentation is made
of it.

What a model can do by itself (whether it has a plan, whether its heads divide) is not known here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal, get_args

from polymux.errors import ConfigError

Mode = Literal["ulysses", "ring", "guidance", "tensor", "hsdp", "vae", "data"]
Other = Literal["layerwise offload", "model offload", "quantization", "adapters", "step cache", "streamed frames"]

MODES: tuple[Mode, ...] = get_args(Mode)
OTHERS: tuple[Other, ...] = get_args(Other)

_PARTS = "an adapter's layers are not divided as the model's are"
_CUT = "quantized weights are packed, and are not cut"
_PLACE = "both decide where a block's weights are"
_SKIP = "a rank that sees a part of the tokens would skip steps that another one computes"

REFUSED: Mapping[frozenset[Mode | Other], str] = {
    frozenset({"tensor", "hsdp"}): "both divide the same weights",
    frozenset({"hsdp", "layerwise offload"}): _PLACE,
    frozenset({"hsdp", "model offload"}): _PLACE,
    frozenset({"hsdp", "quantization"}): _CUT,
    frozenset({"hsdp", "adapters"}): _PARTS,
    frozenset({"tensor", "quantization"}): _CUT,
    frozenset({"tensor", "adapters"}): _PARTS,
    frozenset({"ulysses", "step cache"}): _SKIP,
    frozenset({"ring", "step cache"}): _SKIP,
    frozenset({"vae", "streamed frames"}): "frames are streamed as they are decoded, tiles are complete together",
}


def check_modes(used: Mapping[Mode | Other, str]) -> None:
    """Raise ConfigError if two of what is in use, each with the flag that asked for it, do not go together."""
    for one, other in itertools.combinations(used, 2):
        reason = REFUSED.get(frozenset({one, other}))
        if reason is not None:
            raise ConfigError(f"{used[one]} and {used[other]} do not go together: {reason}")


def table() -> str:
    """A table of all pairs in markdown: "+" for those that go together, else a number; and what the numbers mean."""
    reasons = list(dict.fromkeys(REFUSED.values()))
    lines = [f"| | {' | '.join(MODES)} |", "|---" * (len(MODES) + 1) + "|"]
    for row in (*MODES, *OTHERS):
        cells = [_cell(frozenset({row, column}), reasons) for column in MODES]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))])


def _cell(pair: frozenset[Mode | Other], reasons: list[str]) -> str:
    if len(pair) == 1:
        return ""
    return str(reasons.index(REFUSED[pair]) + 1) if pair in REFUSED else "+"
