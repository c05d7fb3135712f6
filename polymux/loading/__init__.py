"""From a name to a placed pipeline, or to the parts of a model of transformers.

The names come from their modules when they are asked for: who loads the one kind does not import what the other needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polymux.loading.cached import CachedLoader as CachedLoader
    from polymux.loading.dtypes import auto_dtype as auto_dtype
    from polymux.loading.generate import load_decoder as load_decoder
    from polymux.loading.generate import load_parts as load_parts
    from polymux.loading.generate import part_of as part_of
    from polymux.loading.layout import model_class_in as model_class_in
    from polymux.loading.pipeline import load_pipeline as load_pipeline
    from polymux.loading.sliced import Ranks as Ranks
    from polymux.loading.sliced import SlicedLoader as SlicedLoader
    from polymux.loading.source import resolve as resolve

__all__ = [
    "CachedLoader",
    "Ranks",
    "SlicedLoader",
    "auto_dtype",
    "load_decoder",
    "load_parts",
    "load_pipeline",
    "model_class_in",
    "part_of",
    "resolve",
]

_MODULES = {
    "CachedLoader": "cached",
    "Ranks": "sliced",
    "SlicedLoader": "sliced",
    "auto_dtype": "dtypes",
    "load_decoder": "generate",
    "load_parts": "generate",
    "load_pipeline": "pipeline",
    "model_class_in": "layout",
    "part_of": "generate",
    "resolve": "source",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
