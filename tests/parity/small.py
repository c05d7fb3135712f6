"""Pipelines that choose the size of a picture themselves, a megapixel: made to choose a sixteenth of that.

What is tested of them does not depend on the size, and the time does. As they are, they run in `test_warm_up`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from polymux.testing.tiny import TINY

_FEWER = 16
_CHOOSING = {
    "qwen-image-edit": "qwenimage.pipeline_qwenimage_edit",
    "qwen-image-edit-plus": "qwenimage.pipeline_qwenimage_edit_plus",
    "qwen-image-layered": "qwenimage.pipeline_qwenimage_layered",
    "longcat-image-edit": "longcat_image.pipeline_longcat_image_edit",
}
_SIDE = 256


def choose_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tiny pipeline of that name, which may be any; once in a test."""
    if name in _CHOOSING:
        module = importlib.import_module(f"diffusers.pipelines.{_CHOOSING[name]}")
        original: Callable[..., Any] = module.calculate_dimensions
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: original(area / _FEWER, ratio))


def small_call(name: str, pipeline: Any) -> dict[str, Any]:
    """The same for those whose objects know their size; gives the arguments of a call."""
    call = dict(TINY[name].call)
    if name == "hidream-i1":
        pipeline.default_sample_size //= 4
    elif name == "kandinsky5-t2i":
        pipeline.resolutions = [(_SIDE, _SIDE)]
        call |= {"width": _SIDE, "height": _SIDE}
    return call
