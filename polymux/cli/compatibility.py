"""docs/compatibility.md: which family can have which feature, as `polymux models --compatibility` prints it.

Knows the declarations and what was found in the families' tiny checkpoints; nothing of the models behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polymux.families import features_of
from polymux.families.base import Family
from polymux.families.features import FEATURES
from polymux.families.generate import GenerateFamily
from polymux.request import Modality

_INTRODUCTION = """\
# Compatibility

Made by `polymux models --compatibility` from the declarations in `polymux/families/` and from what is found in a small
checkpoint of each pipeline, with random weights; not edited by hand. `features` in `GET /v1/models` says the same of
the model that is loaded, whose components may be of other classes.

| feature | what it is, or what asks for it |
|---|---|"""
_TESTED = """
Offload and layerwise offload run with every pipeline in `tests/parity/test_offload.py`, batching and guidance in
`tests/parity/test_families.py`, previews in `tests/parity/test_previews.py`, streamed decoding in
`tests/parity/test_streamed_decode.py`. Of the others, the tests run some pipelines; for the rest it is known that what
they need is there. A setting that cannot act on a model is refused when it is loaded, with the reason.

*some*: some of the family's pipelines have it. `polymux models --features` lists the same for the terminal."""
_TITLES: dict[Modality, str] = {"image": "Pictures", "video": "Video", "audio": "Sound"}
_SOUNDING = """
## Speech and music by transformers

Requests are interleaved, and none of the features above applies: settings that ask for one are refused. The families
are"""


def compatibility(families: Sequence[Family], sounding: Sequence[GenerateFamily]) -> Iterator[str]:
    """The lines of the page."""
    yield _INTRODUCTION
    yield from (_row((f"`{name}`", what)) for name, what in FEATURES.items())
    yield _TESTED
    for modality, title in _TITLES.items():
        yield f"\n## {title}\n"
        yield _row(("family", *(name.replace("_", " ") for name in FEATURES)))
        yield "|---" * (len(FEATURES) + 1) + "|"
        for family in families:
            if family.modality == modality:
                yield _row((f"`{family.name}`", *map(_cell, features_of(family).values())))
    yield _SOUNDING
    yield ", ".join(f"`{family.name}`" for family in sounding) + "."


def listed(family: Family | GenerateFamily) -> str:
    """A family's features in one line; in brackets those that some of its pipelines have."""
    if isinstance(family, GenerateFamily):
        return "none"
    held = {name: has for name, has in features_of(family).items() if has is not False}
    return ", ".join(name if has else f"({name})" for name, has in held.items()) or "none"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(has: bool | None) -> str:
    return "some" if has is None else "yes" if has else ""
