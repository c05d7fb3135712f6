"""LoRA adapters of one model: brought in when first asked for, active only in the calls of those who asked.

The base weights are never touched: an adapter is a pair of small matrices beside a layer (peft's), switched on and off
between calls. So what a request gets does not depend on who was served before, and calls merge that have the same
adapters. Which files may be used is not decided here.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from diffusers.loaders.lora_base import LoraBaseMixin

from polymux.config import AdapterConfig
from polymux.diffusion.component import Component
from polymux.diffusion.tuned import AdapterSet
from polymux.errors import ConfigError, InvalidRequestError
from polymux.loading.lora import LoRAFile, find_lora
from polymux.request import LoRARequest

log = logging.getLogger(__name__)

SHOWN = 3  # names of layers in a message
SHOWN_CHARACTERS = 300  # of an error that is passed on


class Adapters:
    """The adapters that a model has now, by file: those of all requests, those in use, and some that were in use."""

    def __init__(
        self, pipeline: Any, components: Sequence[Component], config: AdapterConfig, refused: str | None = None
    ) -> None:
        """`refused`: why this model takes none."""
        self._refused = refused
        self._pipeline, self._components, self._limit = pipeline, components, config.max_loras
        self._standing = [LoRARequest(path=path, scale=config.lora_scale) for path in config.lora_path]
        self._names: OrderedDict[tuple[LoRAFile, str | None], str] = OrderedDict()  # the latest used last
        self._made = 0

    def check_standing(self) -> None:
        """Raises ConfigError if what is to act on every request cannot."""
        if self._standing and not isinstance(self._pipeline, LoraBaseMixin):
            raise ConfigError(f"--lora-path: {type(self._pipeline).__name__} takes no LoRA", param="lora_path")
        try:
            self.use((), ())
        except InvalidRequestError as error:
            raise ConfigError(f"--lora-path: {error.message}", param="lora_path") from None

    def use(self, asked: Sequence[LoRARequest], busy: Collection[str]) -> AdapterSet:
        """What to switch on for a request that asks for these, beside the standing ones; others use `busy` now.

        Raises InvalidRequestError, with the model as it was: an unusable file, or one of which no layer fits.
        """
        if asked and self._refused is not None:
            raise InvalidRequestError(f"lora: {self._refused}", param="lora")
        chosen: dict[str, float] = {}
        try:
            for one in [*self._standing, *asked]:
                name = self._name_of(one)
                if name in chosen:
                    raise InvalidRequestError("lora: the same adapter twice", param="lora")
                chosen[name] = one.scale
        except InvalidRequestError:
            self._make_room(busy)  # those before one that is unusable have been read
            raise
        self._make_room({*busy, *chosen})
        # A scale of zero is no adapter, and such a request runs together with those that have none.
        return tuple((name, scale) for name, scale in chosen.items() if scale != 0)

    def _name_of(self, asked: LoRARequest) -> str:
        key = (find_lora(asked.path), self._denoiser(asked))
        if key not in self._names:
            self._names[key] = self._load(*key)
        self._names.move_to_end(key)
        return self._names[key]

    def _denoiser(self, asked: LoRARequest) -> str | None:
        """The denoiser that it is for, where there are several of the kind."""
        several = [c.name for c in self._components if c.name in ("transformer", "transformer_2")]
        if asked.component is None and len(several) < 2:
            return None
        if asked.component not in several:
            has = f"this model has the denoisers {', '.join(several)}; name the one that it is for"
            allowed = has if several else "this model has one denoiser of another name; leave the component out"
            raise InvalidRequestError(f"lora.component={asked.component!r}: {allowed}", param="lora")
        return asked.component

    def _load(self, file: LoRAFile, component: str | None) -> str:
        name = f"adapter{self._made}"
        self._made += 1
        keys = file.keys()
        try:
            self._inject(file, component, name)
        except ImportError as error:
            raise ConfigError(f"LoRA needs the package peft: {error}") from None
        except Exception as error:  # the conversions of other formats raise whatever they stumble over
            self._remove(name)
            what = f"lora {file.path.name!r}: 0 of {len(keys)} keys matched {type(self._pipeline).__name__}"
            raise InvalidRequestError(f"{what}: {_short(error)}", param="lora") from None
        self._refresh()
        layers = {f"{c.name}.{path}" for c in self._components for path in c.tuned.layers_with(name)}
        self._check_match(file, name, layers)
        return name

    def _inject(self, file: LoRAFile, component: str | None, name: str) -> None:
        pipeline = self._pipeline
        second = {"load_into_transformer_2": True} if component == "transformer_2" else {}
        if file.is_peft:
            denoisers = [c.name for c in self._components if c.role == "denoiser"]
            prefix = next((n for n in ("transformer", "unet") if n in denoisers), "transformer")
            pipeline.load_lora_weights(file.peft_state(prefix), adapter_name=name, **second)
        else:
            pipeline.load_lora_weights(
                str(file.path.parent), weight_name=file.path.name, adapter_name=name, local_files_only=True, **second
            )

    def _check_match(self, file: LoRAFile, name: str, layers: Collection[str]) -> None:
        """Raise if nothing of the file has a place in the model; say so if only a part has."""
        wanted = self._layers_in(file)
        if not layers:
            self._remove(name)
            message = f"lora {file.path.name!r}: 0 of {len(file.keys())} keys matched {type(self._pipeline).__name__}"
            raise InvalidRequestError(message, param="lora")
        if len(layers) < len(wanted):
            missing = sorted(wanted - set(layers)) or ["some"]
            log.warning(
                "lora %s: %d of %d layers matched; without a place are %s%s",
                file.path.name, len(layers), len(wanted), ", ".join(missing[:SHOWN]),
                ", ..." if len(missing) > SHOWN else "",
            )  # fmt: skip

    def _layers_in(self, file: LoRAFile) -> set[str]:
        """The layers of the file under the names that they have after conversion."""
        if file.is_peft:
            prefix = "unet" if any(c.name == "unet" for c in self._components) else "transformer"
            keys: Iterator[str] | Collection[str] = file.peft_state(prefix)
        else:
            converted = self._pipeline.lora_state_dict(str(file.path.parent), weight_name=file.path.name)
            keys = converted[0] if isinstance(converted, tuple) else converted
        return {key.partition(".lora")[0].partition(".lokr")[0] for key in keys if not key.endswith(".alpha")}

    def _make_room(self, busy: Collection[str]) -> None:
        for key, name in list(self._names.items()):
            if len(self._names) <= self._limit:
                return
            if name not in busy:
                del self._names[key]
                self._remove(name)

    def _remove(self, name: str) -> None:
        self._refresh()  # what failed half way has put layers in that are not known yet
        for component in self._components:
            component.tuned.remove(name)
        self._refresh()

    def _refresh(self) -> None:
        for component in self._components:
            component.retune()


def _short(error: Exception) -> str:
    """What went wrong, and the first layer that it went wrong with: some list every layer of the model."""
    first = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
    return first if len(first) <= SHOWN_CHARACTERS else f"{first[:SHOWN_CHARACTERS]}..."
