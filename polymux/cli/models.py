"""`polymux models`: the families that polymux has declarations for, and what each can do.

For the terminal, or as Markdown: docs/families.md is what `polymux models --markdown` prints. Knows the declarations
and nothing of the models behind them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from polymux.cli.compatibility import compatibility, listed
from polymux.families import all_families, all_generate_families
from polymux.families.base import Family, Padding
from polymux.families.chat import ChatFamily
from polymux.families.generate import GenerateFamily
from polymux.families.hearing import HearingFamily
from polymux.families.pictures import DRAWN, PictureFamily
from polymux.request import Modality

HELP = "list the families of models that are known, and what each supports"
USAGE = "polymux models [--pipelines | --features | --markdown | --compatibility]"

_HEADINGS = ("FAMILY", "MAKES", "TASKS", "MERGED", "NOT MERGED, BECAUSE")
_ROLES = ("encoder", "denoiser", "decoder")

_SECTIONS: dict[Modality, str] = {"image": "Pictures", "video": "Video", "audio": "Sound"}
_MARKDOWN_HEADINGS = ("family", "pipelines of diffusers", "tasks", "needs", "merged", "not merged, because", "padded")
_INTRODUCTION = """\
# Families

Made by `polymux models --markdown` from the declarations in `polymux/families/`; not edited by hand.

*Merged* names the calls of different requests that run as one. Two calls run as one if their arguments agree in all but
the batch axis: the same size, number of frames and length of the prompt's embedding. Prompt, seed, guidance scale,
number of steps and position in them may differ. Most pipelines pad prompts to a fixed length; where they do not,
*padded* names the arguments that polymux pads (and the mask that goes with each), so that prompts of any length merge.
What stands under *merged* is proven by `tests/parity`: in company, every family's output is that of diffusers alone.

*Needs* names the input media that a request must bring, and how many of each there may be.

A pipeline of diffusers that is not listed runs too, with its requests interleaved call by call, none merged."""

_PREVIEWS = "\nPictures can be seen on the way (`partial_images`) with every family of pictures{exceptions}."

_SOUNDING_HEADINGS = ("family", "models of transformers", "tasks", "fields", "beside it", "not merged, because")
_SOUNDING = """
## Speech and music by transformers

Each sentence runs the model's own `generate`, or its forward, as a coroutine: requests are interleaved call by call,
none merged. *Fields* are those of `SamplingParams` that it takes, beside `seed`. *Beside it* is the class of a vocoder
or codec that is a model of its own (`--vocoder`). See [speech.md](speech.md).
"""


_ANSWERING_HEADINGS = ("family", "models of transformers", "tasks", "takes", "fields", "not merged, because")
_ANSWERING = """
## Answers by transformers

An answer is the model's own `generate`, as a coroutine: requests are interleaved call by call, none merged. Language
models of common classes and the Omni models are an exception: their answers [go on together](ar_engine.md), though
their speech does not. *Takes* names the media that a conversation may hold beside text, and how many of each; *fields*
are those of `SamplingParams` that it takes, beside `seed`. Any other class whose name ends in `ForCausalLM` runs as
`language`, without a proof.
Other models of transformers are refused. See [chat.md](chat.md).
"""


_DRAWING_HEADINGS = (
    "family",
    "models of transformers",
    "tasks",
    "pictures",
    "answers",
    "not merged, because",
)
_DRAWING = """
## Pictures by transformers

A picture is written token by token by the model's own `generate`, as a coroutine: requests are interleaved call by
call, and merged only where `--merge-decoding` asks for it. The same model answers conversations. *Pictures* names what
a request for a picture may hold beside prompt, size, `n` and `seed`; *answers* the media that a conversation may hold,
and how many of each. See [picture_tokens.md](picture_tokens.md).
"""


_HEARING_HEADINGS = ("family", "models of transformers", "tasks", "fields", "not merged, because")
_HEARING = """
## Transcripts by transformers

What is said in a sound is written down by the model's own `generate`, as a coroutine, likewise. See
[speech.md](speech.md#transcripts).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--pipelines", action="store_true", help="list the pipeline classes of each family too")
    how.add_argument("--features", action="store_true", help="list what each family can have too")
    how.add_argument("--markdown", action="store_true", help="print all of it as a Markdown document")
    how.add_argument("--compatibility", action="store_true", help="print which family can have what, in Markdown")


def run(arguments: argparse.Namespace) -> int:
    families = sorted(all_families(), key=lambda family: family.name)
    sounding = sorted(all_generate_families(), key=lambda family: family.name)
    if arguments.markdown:
        lines = _markdown(families, sounding)
    elif arguments.compatibility:
        lines = compatibility(families, sounding)
    else:
        every: list[Family | GenerateFamily] = [*families, *sounding]
        more: Mapping[str, Sequence[str]] = {}
        if arguments.pipelines:
            more = {f.name: f.pipelines for f in families} | {f.name: f.models for f in sounding}
        elif arguments.features:
            more = {f.name: [listed(f)] for f in every}
        lines = _text(every, more)
    print("\n".join(lines))
    return 0


def _text(families: Sequence[Family | GenerateFamily], more: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A table; `more`: lines below each family, by its name."""
    rows = [_HEADINGS, *((f.name, f.modality, ", ".join(f.tasks), _merged(f), _reason(f)) for f in families)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        yield from (f"    {line}" for line in more.get(row[0], ()))
    yield "\nAny other diffusers pipeline runs too, its requests interleaved, not merged."


def _markdown(families: Sequence[Family], sounding: Sequence[GenerateFamily]) -> Iterator[str]:
    yield _INTRODUCTION
    blind = [f"`{f.name}` ({f.no_previews})" for f in families if f.modality == "image" and f.no_previews]
    yield _PREVIEWS.format(exceptions=f" but {', '.join(blind)}" if blind else "")
    for modality, title in _SECTIONS.items():
        yield f"\n## {title}\n"
        yield _row(_MARKDOWN_HEADINGS)
        yield "|---" * len(_MARKDOWN_HEADINGS) + "|"
        for f in families:
            if f.modality == modality:
                names = "<br>".join(f"`{name}`" for name in f.pipelines)
                needs = ", ".join(f"`{name}`" + (f" (1 to {most})" if most > 1 else "") for name, most in f.media)
                padded = "<br>".join(map(_padded, f.padding))
                yield _row((f"`{f.name}`", names, ", ".join(f.tasks), needs, _merged(f), _reason(f), padded))
    yield _SOUNDING
    yield _row(_SOUNDING_HEADINGS)
    yield "|---" * len(_SOUNDING_HEADINGS) + "|"
    for g in (g for g in sounding if not isinstance(g, (HearingFamily, ChatFamily))):
        names = "<br>".join(f"`{name}`" for name in g.models)
        fields = ", ".join(f"`{name}`" for name in g.arguments)
        beside = f"`{g.beside[0]}`" if g.beside is not None else ""
        yield _row((f"`{g.name}`", names, ", ".join(g.tasks), fields, beside, g.unmerged_because))
    yield from _drawing([g for g in sounding if isinstance(g, PictureFamily)])
    yield _HEARING
    yield _row(_HEARING_HEADINGS)
    yield "|---" * len(_HEARING_HEADINGS) + "|"
    for h in (g for g in sounding if isinstance(g, HearingFamily)):
        names = "<br>".join(f"`{name}`" for name in h.models)
        fields = ", ".join(f"`{name}`" for name in h.arguments)
        yield _row((f"`{h.name}`", names, ", ".join(h.tasks), fields, h.unmerged_because))
    yield _ANSWERING
    yield _row(_ANSWERING_HEADINGS)
    yield "|---" * len(_ANSWERING_HEADINGS) + "|"
    for c in (g for g in sounding if isinstance(g, ChatFamily) and not isinstance(g, PictureFamily)):
        names = "<br>".join(f"`{name}`" for name in c.models)
        takes = ", ".join(f"`{kind}` ({most})" for kind, most in c.takes)
        fields = ", ".join(f"`{name}`" for name in c.arguments)
        yield _row((f"`{c.name}`", names, ", ".join(c.tasks), takes, fields, c.unmerged_because))


def _drawing(families: Sequence[PictureFamily]) -> Iterator[str]:
    yield _DRAWING
    yield _row(_DRAWING_HEADINGS)
    yield "|---" * len(_DRAWING_HEADINGS) + "|"
    for f in families:
        names = "<br>".join(f"`{name}`" for name in f.models)
        fields = ", ".join(f"`{name}`" for name in (*f.picture_arguments, *DRAWN))
        takes = ", ".join(f"`{kind}` ({most})" for kind, most in f.takes)
        yield _row((f"`{f.name}`", names, ", ".join(f.tasks), fields, takes, f.unmerged_because))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _merged(family: Family | GenerateFamily) -> str:
    return ", ".join(role for role in _ROLES if role in family.merge) or "-"


def _reason(family: Family | GenerateFamily) -> str:
    return family.unmerged_because or ""


def _padded(rule: Padding) -> str:
    return f"{rule.role}: `{rule.argument}`" + (f" (`{rule.mask}`)" if rule.mask is not None else "")
