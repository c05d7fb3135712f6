"""A causal language model of transformers as a function from tokens and their places to logits.

Where it is told, features stand in the places of some tokens; where it is asked, the states of one of its layers come
with the logits. The modules are the model's own; only their attention is another. Knows what a model must be like for
that to be right.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch

from polymux.ar.attention import IMPLEMENTATION, register
from polymux.ar.features import Told
from polymux.ar.layers import CompiledLayers
from polymux.ar.paged_cache import Shape

_EVERYTHING = "full_attention"
_ROPES = {"dynamic", "longrope"}  # their angles change with the longest sequence of a batch
# Settings of a checkpoint's generation that change which tokens come, and that a `Drawing` does not hold.
_BEYOND = {
    "num_beams": 1,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "watermarking_config": None,
    "renormalize_logits": None,
    "remove_invalid_values": None,
}


def refusal(model: Any) -> str | None:
    """Why this model cannot be a `Network`, if it cannot."""
    config = model.get_decoder().config
    kinds = {*(getattr(config, "layer_types", None) or (_EVERYTHING,))}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {_EVERYTHING} or (window is not None and not getattr(config, "layer_types", None)):
        return "not all of its layers look at everything before"
    if _ROPES & {*map(str, _values(getattr(config, "rope_parameters", None) or {}))}:
        return "where its tokens stand depends on the longest of those beside them"
    return beyond(model.generation_config)


def beyond(settings: Any) -> str | None:
    """What a checkpoint's settings of generation ask for that a `Drawing` does not hold, if there is something."""
    odd = [name for name, plain in _BEYOND.items() if getattr(settings, name, None) not in (None, plain, False)]
    return f"its generation_config.json sets {', '.join(odd)}" if odd else None


def _values(settings: dict[str, Any]) -> Iterator[Any]:
    """Of all levels: some models have settings for each kind of layer."""
    for value in settings.values():
        yield from _values(value) if isinstance(value, dict) else (value,)


class Made(NamedTuple):
    """Of tokens: logits (kept, vocabulary); and (tokens, size) of the layer that is listened to, if one is."""

    logits: torch.Tensor
    states: torch.Tensor | None


class Network:
    """`model` belongs to it from now on: its attention finds keys and values in the cache alone."""

    def __init__(self, model: Any, layer: int | None = None, ranks: int = 1) -> None:
        """`layer`: the one to listen to, in the numbers of `hidden_states`, of which -1 is what logits are made of.
        `ranks`: among so many its heads are divided, and what is here is the part of one."""
        self._decoder, self._head = model.get_decoder(), model.get_output_embeddings()
        register(self._decoder)
        self._decoder.set_attn_implementation(IMPLEMENTATION)  # its own: what sees and hears beside it looks otherwise
        self.listens = layer is not None
        layers = self._decoder.layers
        self._heard = self._decoder.norm if layer in (None, -1, len(layers)) else layers[layer - 1]
        config = self._decoder.config
        heads = config.num_attention_heads
        channels = getattr(config, "head_dim", None) or config.hidden_size // heads
        kept = getattr(config, "num_key_value_heads", None) or heads
        self.shape = Shape(config.num_hidden_layers, max(kept // ranks, 1), channels, model.dtype)
        self.vocabulary = int(config.vocab_size)
        self.device: torch.device = model.device

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, keep: Any, cache: int) -> torch.Tensor:
        """Logits (kept, vocabulary) for tokens (tokens) at these positions. `keep`: indices of the tokens whose logits
        are wanted; 0: all. `cache`: the number of the cache, whose batch says what belongs together."""
        return self._made(keep, input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=cache)

    def read(self, ids: torch.Tensor, positions: torch.Tensor, keep: Any, cache: int, told: Told | None = None) -> Made:
        """The same, with what else there is. `positions`: (tokens) or, in three orders, (3, tokens); `told`: what
        stands in the places of some of these tokens."""
        given: dict[str, Any] = {"input_ids": ids[None]} if told is None else self._with(ids, told)
        heard: list[torch.Tensor] = []
        hook = self._heard.register_forward_hook(lambda *made: heard.append(made[2][0])) if self.listens else None
        try:
            logits = self._made(keep, **given, position_ids=positions.unsqueeze(-2), use_cache=False, paged=cache)
        finally:
            if hook is not None:
                hook.remove()
        return Made(logits, heard[0] if heard else None)

    def embedded(self, ids: torch.Tensor, told: Told | None) -> torch.Tensor:
        """(tokens, size): what the first layer is given."""
        made: torch.Tensor = self._decoder.get_input_embeddings()(ids)
        return made if told is None else made.index_copy(0, told.at, told.inputs)

    def _with(self, ids: torch.Tensor, told: Told) -> dict[str, Any]:
        given: dict[str, Any] = {"inputs_embeds": self.embedded(ids, told)[None]}
        if told.deep_at is not None:
            given |= {"visual_pos_masks": told.deep_at[None], "deepstack_visual_embeds": list(told.deeper)}
        return given

    def _made(self, keep: Any, **given: Any) -> torch.Tensor:
        states = self._decoder(**given).last_hidden_state[0]
        logits: torch.Tensor = self._head(states[keep] if isinstance(keep, torch.Tensor) else states)
        return logits

    @cached_property
    def layers(self) -> CompiledLayers:
        """Its layers, which can run as few kernels."""
        return CompiledLayers(self._decoder)
