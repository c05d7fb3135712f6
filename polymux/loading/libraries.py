"""What polymux asks of diffusers and transformers while loading: classes by name, quiet, and one kind of error.

Nothing here knows checkpoints' layouts. The differences between the supported versions of the libraries live here.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj
from diffusers.utils import get_class_from_dynamic_module
from diffusers.utils import logging as diffusers_logging
from packaging.version import Version
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

# diffusers 0.42 renamed the argument; transformers did so before the oldest version that is supported.
DIFFUSERS_DTYPE = "dtype" if Version(diffusers.__version__) >= Version("0.42") else "torch_dtype"


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
def quiet() -> Iterator[None]:
    """No warnings and no bars from the libraries: polymux reports what matters of it itself, in one line each."""
    libraries = (diffusers_logging, transformers_logging)
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


def pipeline_class(name: str) -> type[Any] | None:
    """A pipeline class of diffusers, classic or modular; None if the installed version has none of that name."""
    with reading(f"diffusers.{name}"):
        found = getattr(diffusers, name, None)
    bases = (diffusers.DiffusionPipeline, diffusers.ModularPipeline)
    return found if isinstance(found, type) and issubclass(found, bases) else None


def component_class(library: str, name: str) -> type[Any] | None:
    """The class of a component. Only the two libraries are asked: importing a module because a checkpoint names it
    would run whatever that is."""
    if library not in ("diffusers", "transformers") and not hasattr(diffusers.pipelines, library):
        return None
    with reading(f"{library}.{name}"):
        try:
            found = simple_get_class_obj(library, name)
        except AttributeError:
            return None
    return found if isinstance(found, type) else None


def code_class(folder: Path, module: str, name: str) -> type[Any]:
    """A class out of a checkpoint's own code: runs it. For users who said that they trust it."""
    trust = "trust_remote_code" in inspect.signature(get_class_from_dynamic_module).parameters
    found: type[Any] = get_class_from_dynamic_module(
        str(folder), module_file=f"{module}.py", class_name=name, **({"trust_remote_code": True} if trust else {})
    )
    return found


def is_diffusers_model(cls: type[Any]) -> bool:
    return issubclass(cls, diffusers.ModelMixin)


def is_transformers_model(cls: type[Any]) -> bool:
    return issubclass(cls, transformers.PreTrainedModel)


def tokenizers_in(component: object) -> list[Any]:
    """A tokenizer itself, or those that a processor holds."""
    if isinstance(component, transformers.ProcessorMixin):
        candidates = list(vars(component).values())
    else:
        candidates = [component]
    return [item for item in candidates if isinstance(item, transformers.PreTrainedTokenizerBase)]
