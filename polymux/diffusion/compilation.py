"""Has the denoisers of a model run compiled blocks, where that was chosen, and says what runs and why.

Encoders stay as they are: they run once for a prompt, and what they give is remembered. So do decoders, which have no
repeated blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from polymux.compilation_config import CompilationConfig
from polymux.config import use_compile_cache
from polymux.diffusion.compiled_blocks import CompiledBlocks
from polymux.diffusion.component import Component
from polymux.errors import ConfigError
from polymux.families.base import Family

log = logging.getLogger(__name__)


class CompiledDenoisers:
    """Of one model. To be made before caches and streams put their hooks in, and settled after."""

    def __init__(self) -> None:
        self._blocks: dict[str, tuple[Component, CompiledBlocks]] = {}
        self._why: dict[str, str] = {}  # by denoiser: why its blocks run as they are
        self._config, self._described = CompilationConfig(), ""

    @classmethod
    def apply(
        cls,
        config: CompilationConfig,
        components: Sequence[Component],
        family: Family,
        device: torch.device,
        divided: str | None = None,
    ) -> CompiledDenoisers:
        """`divided`: why the denoisers are not to be compiled, whatever they are."""
        made, denoisers = cls(), [component for component in components if component.role == "denoiser"]
        made._config = config
        settings, reason = config.choice(device.type)
        if settings is None:
            made._why = {component.name: reason for component in denoisers}
            return made
        if settings.backend == "inductor":
            reason = f"{reason}; kept in {use_compile_cache(settings.cache_dir)}"
        made._described = f"{settings.summary} ({reason})"
        for component in denoisers:
            problem = divided or CompiledBlocks.problem(component.module, family)
            if problem is not None:
                made._why[component.name] = problem
                continue
            blocks = CompiledBlocks(component.name, component.module, family, settings)
            made._blocks[component.name] = component, blocks
            component.look_up()
        made._check_met()
        return made

    def settle(self) -> None:
        """Everybody's hooks are in: see what can be compiled as it is now, and log it.

        Raises ConfigError if compilation was asked for and there is nothing to compile.
        """
        for name, (component, blocks) in self._blocks.items():
            problem = blocks.hooked()
            if problem is None:
                component.compiled = blocks
                log.info("compile: %s: %s: %s", name, blocks.summary, self._described)
            else:
                blocks.eager = True
                self._why[name] = problem
        self._check_met()
        for name, why in self._why.items():
            log.info("compile: %s: its blocks run eagerly: %s", name, why)

    @property
    def used(self) -> bool:
        """Whether blocks are compiled, when they first run."""
        return any(name not in self._why for name in self._blocks)

    def _check_met(self) -> None:
        asked = self._config.asked_by
        if asked is not None and not self.used:
            reasons = "; ".join(f"{name}: {why}" for name, why in self._why.items()) or "there is no denoiser"
            flag = "--no-enforce-eager" if asked == "enforce_eager" else "--compilation-config"
            raise ConfigError(f"{flag}: nothing can be compiled: {reasons}", param=asked)

    def undo(self) -> None:
        """The denoisers as they were."""
        for component, blocks in self._blocks.values():
            blocks.undo()
            component.compiled = None
        self._blocks.clear()
