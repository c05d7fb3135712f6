"""What a user may say about loading beyond the named settings: `diffusers_load_kwargs`, sorted and checked.

The names are those of diffusers' `from_pretrained`. Every one is either a flag below, a component or value of the
pipeline at hand, or refused with the reason; whether a component exists is known only to the plan of the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from polymux.errors import ConfigError

_PLACED = "polymux places the components; see the device and offload settings"
_OWN_FORMAT = "this format of weights is not supported"
REFUSED = {
    "torch_dtype": "use the setting dtype",
    "dtype": "use the setting dtype",
    "revision": "use the setting revision",
    "cache_dir": "use the setting cache_dir",
    "local_files_only": "set HF_HUB_OFFLINE=1",
    "device_map": _PLACED,
    "max_memory": _PLACED,
    "offload_folder": _PLACED,
    "offload_state_dict": _PLACED,
    "low_cpu_mem_usage": _PLACED,
    "quantization_config": "use the setting diffusion_quantization_config",
    "custom_pipeline": "code is taken from the checkpoint's own folder only, with trust_remote_code",
    "custom_revision": "code is taken from the checkpoint's own folder only, with trust_remote_code",
    "load_connected_pipeline": "give the folder of one pipeline",
    "output_loading_info": "polymux checks it itself",
    "proxies": "set HTTPS_PROXY",
    "mirror": "set HF_ENDPOINT",
    "use_flashpack": _OWN_FORMAT,
    "use_onnx": _OWN_FORMAT,
    "provider": _OWN_FORMAT,
    "provider_options": _OWN_FORMAT,
    "sess_options": _OWN_FORMAT,
}


class LoadFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of diffusers' `from_pretrained` that are honoured."""

    variant: str | None = None
    use_safetensors: bool | None = None
    disable_mmap: bool = False
    trust_remote_code: bool = False
    token: str | bool | None = None
    force_download: bool = False


@dataclass(frozen=True)
class LoadOptions:
    """`given` are ready components (None: leave this one out) and values for the pipeline's constructor."""

    flags: LoadFlags = field(default_factory=LoadFlags)
    given: Mapping[str, object] = field(default_factory=dict)

    def check_names(self, accepted: Iterable[str], who: str) -> None:
        """Raise ConfigError if something was given that the pipeline does not have."""
        known = sorted(accepted)
        for name in self.given:
            if name not in known:
                names = ", ".join([*known, *LoadFlags.__struct_fields__])
                raise ConfigError(
                    f"diffusers_load_kwargs: {who} takes no {name!r}; known are {names}", param="diffusers_load_kwargs"
                )


def parse_options(load_kwargs: Mapping[str, object], components: Mapping[str, object] | None = None) -> LoadOptions:
    """Sort `diffusers_load_kwargs` and ready-made components. Raises ConfigError on what is refused or ill-typed."""
    flags: dict[str, object] = {}
    given = dict(components or {})
    for name, value in load_kwargs.items():
        if name in REFUSED:
            raise ConfigError(f"diffusers_load_kwargs: {name!r}: {REFUSED[name]}", param="diffusers_load_kwargs")
        if name in LoadFlags.__struct_fields__:
            flags[name] = value
        elif name in given:
            raise ConfigError(f"diffusers_load_kwargs: {name!r} is given twice", param="diffusers_load_kwargs")
        else:
            given[name] = value
    try:
        return LoadOptions(msgspec.convert(flags, LoadFlags, strict=True), given)
    except msgspec.ValidationError as error:
        raise ConfigError(f"diffusers_load_kwargs: {error}", param="diffusers_load_kwargs") from None
