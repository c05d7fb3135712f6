"""From a name to a placed pipeline."""

from polymux.loading.cached import CachedLoader
from polymux.loading.dtypes import auto_dtype
from polymux.loading.generate import load_decoder, load_parts, part_of
from polymux.loading.layout import model_class_in
from polymux.loading.pipeline import load_pipeline
from polymux.loading.sliced import Ranks, SlicedLoader
from polymux.loading.source import resolve

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
