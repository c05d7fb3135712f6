"""What polymux asks of diffusers and transformers while loading: quiet, kinds of classes, and one kind of error.

Nothing here knows checkpoints' layouts. A model of transformers needs no diffusers, which is imported only when it is
asked about; what is asked of it alone stands in `diffusers_classes`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from polymux.errors import CheckpointError, ConfigError

# What the libraries raise over a checkpoint that they cannot make sense of.
LIBRARY_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    RuntimeError,
    AssertionError,
    EOFError,
    SafetensorError,
    pickle.UnpicklingError,
)


def one_line(error: BaseException) -> str:
    """The first line of a library's message, with the kind of error if the message alone would say little."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0][:400] if lines else ""
    return text if len(text.split()) > 3 else f"{type(error).__name__}: {text}".rstrip(": ")


@contextmanager
def reading(what: str | Path) -> Iterator[None]:
    """Turn the libraries' errors into one CheckpointError that begins with `what`."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ConfigError(f"{what}: does not fit into memory: {one_line(error)}", param="device") from error
    except LIBRARY_ERRORS as error:
        raise CheckpointError(f"{what}: {one_line(error)}") from error


@contextmanager
def quiet(*more: Any) -> Iterator[None]:
    """No warnings and no bars from transformers: polymux reports what matters of it itself, in one line each. `more`:
    other libraries' modules for logging, made alike."""
    libraries = (transformers_logging, *more)
    before = [(library.get_verbosity(), library.is_progress_bar_enabled()) for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, (verbosity, bars) in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
            if bars:
                library.enable_progress_bar()


def is_diffusers_model(cls: type[Any]) -> bool:
    if is_transformers_model(cls):
        return False
    from diffusers import ModelMixin  # not for a model of transformers

    return issubclass(cls, ModelMixin)


def is_transformers_model(cls: type[Any]) -> bool:
    return issubclass(cls, transformers.PreTrainedModel)


def tokenizers_in(component: object) -> list[Any]:
    """A tokenizer itself, or those that a processor holds."""
    if isinstance(component, transformers.ProcessorMixin):
        candidates = list(vars(component).values())
    else:
        candidates = [component]
    return [item for item in candidates if isinstance(item, transformers.PreTrainedTokenizerBase)]
