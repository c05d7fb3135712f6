"""LoRA adapters of one model: brought in when first asked for, active only in the calls of those who asked.

The base weights are never touched: an adapter is a pair of small matrices beside a layer (peft's), switched on and off
between calls. So what a request gets does not depend on who was served before, and calls merge that have the same
adapters. Which files may be used is not decided here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from polymux.config import AdapterConfig
from polymux.diffusion.component import Component
from polymux.diffusion.lora_weights import check_match, check_takes_lora, inject, standing
from polymux.diffusion.tuned import AdapterSet
from polymux.errors import ConfigError, InvalidRequestError
from polymux.loading.lora import LoRAFile, find_lora
from polymux.request import LoRARequest


class Adapters:
    """The adapters that a model has now, by file: those of all requests, those in use, and some that were in use."""

    def __init__(
        self, pipeline: Any, components: Sequence[Component], config: AdapterConfig, refused: str | None = None
    ) -> None:
        """`refused`: why this model takes none."""
        self._refused = refused
        self._pipeline, self._components, self._limit = pipeline, components, config.max_loras
        self._standing = [] if config.distills else standing(config)
        self._names: OrderedDict[tuple[LoRAFile, str | None], str] = OrderedDict()  # the latest used last
        self._made = 0

    def check_standing(self) -> None:
        """Raises ConfigError if what is to act on every request cannot."""
        if self._standing:
            check_takes_lora(self._pipeline)
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
        try:
            inject(self._pipeline, file, component, name)
            self._refresh()
            layers = {f"{c.name}.{path}" for c in self._components for path in c.tuned.layers_with(name)}
            check_match(self._pipeline, file, layers)
        except InvalidRequestError:
            self._remove(name)
            raise
        return name

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
