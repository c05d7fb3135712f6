"""From a name to a placed pipeline."""

from polymux.loading.dtypes import auto_dtype
from polymux.loading.pipeline import load_pipeline
from polymux.loading.source import resolve

__all__ = ["auto_dtype", "load_pipeline", "resolve"]
