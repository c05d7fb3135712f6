"""The worked example of docs/adding_a_family.md, as it stands there: it passes, and fails where the text says so."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polymux import families
from polymux.families import qwen_image as declarations
from polymux.families.base import Family, Padding
from polymux.testing.tiny import TINY
from polymux.testing.tiny.makers import qwen_image as makers

from .test_families import test_family as check_parity

TEXT = (Path(__file__).parents[2] / "docs" / "adding_a_family.md").read_text(encoding="utf-8")
NAME = "qwen-image-inpaint"


def run_block(number: int, module: Any) -> dict[str, Any]:
    """Run a code block of the text as if it stood in `module`."""
    names = dict(vars(module))
    exec(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[number], names)
    return names


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setitem(TINY, NAME, None)  # so that it is taken out again
    run_block(0, makers)
    declared: Family = run_block(1, declarations)["QWEN_IMAGE_INPAINT"]
    return declared


def declare(monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    for pipeline in family.pipelines:
        monkeypatch.setitem(families._BY_PIPELINE, pipeline, family)


def test_it_is_right(monkeypatch: pytest.MonkeyPatch, family: Family, tiny_checkpoint: Callable[..., Path]) -> None:
    declare(monkeypatch, family)
    check_parity(NAME, tiny_checkpoint, monkeypatch)


def test_claiming_too_little_is_right_too(
    monkeypatch: pytest.MonkeyPatch, family: Family, tiny_checkpoint: Callable[..., Path]
) -> None:
    declare(monkeypatch, dataclasses.replace(family, padding=()))
    check_parity(NAME, tiny_checkpoint, monkeypatch)


def test_claiming_too_much_fails(
    monkeypatch: pytest.MonkeyPatch, family: Family, tiny_checkpoint: Callable[..., Path]
) -> None:
    declare(monkeypatch, dataclasses.replace(family, padding=(Padding(argument="encoder_hidden_states"),)))
    with pytest.raises(AssertionError, match=r"0\.12\d+ <= 0\.0001"):
        check_parity(NAME, tiny_checkpoint, monkeypatch)
