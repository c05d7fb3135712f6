"""TeaCache: steps are left out as long as little has changed of what the timestep does to the input of the blocks.

Before the first block runs, an indicator is compared with that of the step before: the first block's normed input, or
the embedding of the timestep. A polynomial makes of its relative change an estimate of how much the output changes;
while the sum of these stays below a threshold, what all blocks added the last time is added again, and none runs. First
and last step are always computed. Polynomials belong to checkpoints: some are published, others are measured.

The blocks after the first have the hook of diffusers' first-block cache, which passes on what it gets in such a step.
"""

from __future__ import annotations

import inspect
import json
import logging
from functools import reduce
from typing import Any

import numpy as np
import torch
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.hooks.first_block_cache import FBCBlockHook, FBCSharedBlockState
from diffusers.hooks.hooks import HookRegistry, ModelHook, StateManager

from polymux.diffusion.cached_denoiser import CachedDenoiser, blocks_of, unknown_blocks, unsuited
from polymux.diffusion.call import Place
from polymux.families.base import Family
from polymux.step_caches import TeaCache

log = logging.getLogger(__name__)

HEAD, OTHERS = "polymux_tea_cache_head", "polymux_tea_cache_block"
DEGREE = 4  # of the polynomials that are published, and of those that are measured


class TeaState(FBCSharedBlockState):  # type: ignore[misc]
    """What a request's branch remembers. `head_block_output` is what went into the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.indicator: torch.Tensor | None = None
        self.change = 0.0  # of the indicator, in this step
        self.estimate = 0.0  # of how the output has changed since the last step that was computed
        self.output: torch.Tensor | None = None  # of the last block; kept while measuring
        self.measured: list[tuple[float, float]] = []  # changes of the indicator, and of the output

    def observe(self, indicator: torch.Tensor) -> bool:
        """Take in the indicator of this step. Whether there was one before."""
        before, self.indicator = self.indicator, indicator
        if before is None:
            return False
        self.change = relative_change(indicator, before)
        return True

    def measure(self, output: torch.Tensor) -> None:
        if self.output is not None:
            self.measured.append((self.change, relative_change(output, self.output)))
        self.output = output


class TeaHead(ModelHook):  # type: ignore[misc]
    """On the first block: decides, and answers for all blocks where none is to run."""

    _is_stateful = True

    def __init__(self, states: StateManager, settings: TeaCache, coefficients: tuple[float, ...], indicator: str):
        super().__init__()
        self.states, self.settings, self.coefficients, self.source = states, settings, coefficients, indicator

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self.known: TransformerBlockMetadata = TransformerBlockRegistry.get(type(module))
        return module

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        known, state = self.known, self.states.get_state()
        hidden = known._get_parameter_from_args_kwargs(known.hidden_states_argument_name, args, kwargs)
        embedding = known._get_parameter_from_args_kwargs("temb", args, kwargs)
        state.should_compute = self._decide(state, self._indicator(module, hidden, embedding))
        text_index = known.return_encoder_hidden_states_index
        text = None
        if text_index is not None:
            text = known._get_parameter_from_args_kwargs(known.encoder_hidden_states_argument_name, args, kwargs)
        if state.should_compute:
            state.head_block_output = hidden if text_index is None else (hidden, text)
            return self.fn_ref.original_forward(*args, **kwargs)
        added, added_to_text = state.tail_block_residuals
        if text_index is None:
            return hidden + added
        return (hidden + added, text + added_to_text) if text_index else (text + added_to_text, hidden + added)

    def _indicator(self, module: Any, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        if self.source == "temb":
            return embedding
        normed: torch.Tensor = module.norm1(hidden, emb=embedding)[0]
        return normed

    def _decide(self, state: TeaState, indicator: torch.Tensor) -> bool:
        place = self.states.context
        comparable = state.observe(indicator)
        if self.settings.calibrate or not comparable or place.step_index in (0, place.num_inference_steps - 1):
            state.estimate = 0.0
            return True
        # An estimate below 0 is where the polynomial does not fit, and no reason to leave out more.
        state.estimate += max(reduce(lambda total, c: total * state.change + c, self.coefficients, 0.0), 0.0)
        if state.estimate < self.settings.rel_l1_thresh:
            return False
        state.estimate = 0.0
        return True

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self.states.reset()
        return module


class MeasuringTail(FBCBlockHook):  # type: ignore[misc]
    """On the last block, in place of diffusers' hook: notes how its output changes."""

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = super().new_forward(module, *args, **kwargs)
        hidden = output[self._metadata.return_hidden_states_index] if isinstance(output, tuple) else output
        self.state_manager.get_state().measure(hidden)
        return output


class TeaDenoiser(CachedDenoiser[TeaCache]):
    @classmethod
    def problem(cls, module: torch.nn.Module, settings: TeaCache, family: Family) -> str | None:
        if (reason := unknown_blocks(module)) is not None:
            return reason
        head = blocks_of(module)[0]
        if "temb" not in inspect.signature(type(head).forward).parameters:
            return f"{type(head).__name__} does not get an embedding of the timestep as `temb`"
        if settings.coefficients is None and not settings.calibrate and _published(module, family) is None:
            return f"no coefficients are known for this {family.name}: measure them with calibrate (docs/step_cache.md)"
        return None

    def install(self) -> None:
        settings, registries = self.settings, HookRegistry.check_if_exists_or_initialize
        self._measured: list[tuple[float, float]] = []
        states = StateManager(TeaState)
        head, *others = blocks_of(self.module)
        registries(self.module)  # of the root: where a cache context looks
        coefficients = settings.coefficients or _published(self.module, self.family) or ()
        registries(head).register_hook(TeaHead(states, settings, coefficients, self.family.step_caches.indicator), HEAD)
        for block in others[:-1]:
            registries(block).register_hook(FBCBlockHook(states), OTHERS)
        tail = MeasuringTail if settings.calibrate else FBCBlockHook
        registries(others[-1]).register_hook(tail(states, is_tail=True), OTHERS)
        registries(self.module).invalidate_child_registries_cache()

    def remove(self) -> None:
        registry = HookRegistry.check_if_exists_or_initialize(self.module)
        for name in (HEAD, OTHERS):
            registry.remove_hook(name, recurse=True)
        registry.invalidate_child_registries_cache()

    def prepare(self, name: str, place: Place) -> None:
        if place.steps < 1:
            raise unsuited(self.settings.name, "the pipeline does not say how many steps it makes")

    def shortened(self, name: str) -> bool:
        return not all(self.state(manager, name).should_compute for manager in self.managers)

    def forget(self, prefix: str) -> None:
        if self.settings.calibrate:
            ended = [state for m in self.managers for name, state in m._state_cache.items() if name.startswith(prefix)]
            pairs = [state.measured for state in ended if len(state.measured) > DEGREE]  # that of a warm-up has fewer
            self._measured += [pair for measured in pairs for pair in measured]
            if pairs:
                self._report()
        super().forget(prefix)

    def _report(self) -> None:
        """The polynomial for all that was measured so far, ready to be given back."""
        changes, outputs = zip(*self._measured, strict=True)
        coefficients = [float(f"{c:.9g}") for c in np.polyfit(changes, outputs, DEGREE)]
        said = json.dumps({"coefficients": coefficients})
        log.info("tea_cache: measured over %d steps: --cache-config '%s'", len(self._measured), said)


def relative_change(now: torch.Tensor, before: torch.Tensor) -> float:
    """Between two steps: means of absolute values, in proportion."""
    return float((now - before).abs().mean() / before.abs().mean())


def _published(module: Any, family: Family) -> tuple[float, ...] | None:
    """The coefficients that the family has for a checkpoint of this config."""
    for (key, value), coefficients in family.step_caches.coefficients:
        if key == "" or module.config.get(key) == value:
            return coefficients
    return None
