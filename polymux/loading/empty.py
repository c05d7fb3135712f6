"""A model without weights, built from its config the way its own library builds it before it loads them.

Parameters have a shape and no storage; what a model computes when it is built (rotary frequencies, position ids) is
real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers


def empty_diffusers_model(cls: type[Any], config: dict[str, object], dtype: torch.dtype) -> torch.nn.Module:
    """As `from_pretrained` does it: parameters on the meta device and real buffers, made while `dtype` is the default.

    Raises what the library raises over a config that it cannot make sense of.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with accelerate.init_empty_weights(include_buffers=False):
            model: torch.nn.Module = cls.from_config(config)
    finally:
        torch.set_default_dtype(before)
    return model


def empty_language_model(cls: type[Any], folder: Path, dtype: torch.dtype) -> Any:
    """As `from_pretrained` does it, with the settings of its generation that lie beside it. Raises what the library
    raises."""
    config = cls.config_class.from_pretrained(str(folder), local_files_only=True)
    with accelerate.init_empty_weights(include_buffers=False):
        model = cls._from_config(config, dtype=dtype)
    if (folder / transformers.utils.GENERATION_CONFIG_NAME).is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return model
