"""Classes of diffusers by name: pipelines, their components, and code that a checkpoint brings along.

Nothing here knows checkpoints' layouts. The differences between the supported versions of diffusers live here.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import diffusers
from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj
from diffusers.utils import get_class_from_dynamic_module
from packaging.version import Version

from polymux.importing import many_imports
from polymux.loading.libraries import reading

# diffusers 0.42 renamed the argument; transformers did so before the oldest version that is supported.
DIFFUSERS_DTYPE = "dtype" if Version(diffusers.__version__) >= Version("0.42") else "torch_dtype"


def pipeline_class(name: str) -> type[Any] | None:
    """A pipeline class of diffusers, classic or modular; None if the installed version has none of that name."""
    with reading(f"diffusers.{name}"), many_imports():
        found = getattr(diffusers, name, None)
    bases = (diffusers.DiffusionPipeline, diffusers.ModularPipeline)
    return found if isinstance(found, type) and issubclass(found, bases) else None


def component_class(library: str, name: str) -> type[Any] | None:
    """The class of a component. Only the two libraries are asked: importing a module because a checkpoint names it
    would run whatever that is."""
    if library not in ("diffusers", "transformers") and not hasattr(diffusers.pipelines, library):
        return None
    with reading(f"{library}.{name}"), many_imports():
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
