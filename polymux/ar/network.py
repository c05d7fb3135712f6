"""A causal language model of transformers as a function from tokens and their places to logits.

The modules are the model's own; only their attention is another. Knows what a model must be like for that to be right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch

from polymux.ar.attention import IMPLEMENTATION, register
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
    config = model.config
    kinds = {*(getattr(config, "layer_types", None) or (_EVERYTHING,))}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {_EVERYTHING} or (window is not None and not getattr(config, "layer_types", None)):
        return "not all of its layers look at everything before"
    if _ROPES & {*map(str, _values(getattr(config, "rope_parameters", None) or {}))}:
        return "where its tokens stand depends on the longest of those beside them"
    settings = model.generation_config
    odd = [name for name, plain in _BEYOND.items() if getattr(settings, name, None) not in (None, plain, False)]
    return f"its generation_config.json sets {', '.join(odd)}" if odd else None


def _values(settings: dict[str, Any]) -> Iterator[Any]:
    """Of all levels: some models have settings for each kind of layer."""
    for value in settings.values():
        yield from _values(value) if isinstance(value, dict) else (value,)


class Network:
    """`model` belongs to it from now on: its attention finds keys and values in the cache alone. `ranks`: among so many
    its heads are divided, and what is here is the part of one."""

    def __init__(self, model: Any, ranks: int = 1) -> None:
        register()
        self._model = model
        model.set_attn_implementation(IMPLEMENTATION)
        config = model.config
        heads = config.num_attention_heads
        channels = getattr(config, "head_dim", None) or config.hidden_size // heads
        kept = getattr(config, "num_key_value_heads", None) or heads
        self.shape = Shape(config.num_hidden_layers, max(kept // ranks, 1), channels, model.dtype)
        self.vocabulary = int(config.vocab_size)
        self.device: torch.device = model.device

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, keep: Any, cache: int) -> torch.Tensor:
        """Logits (kept, vocabulary) for tokens (tokens) at these positions. `keep`: indices of the tokens whose logits
        are wanted; 0: all. `cache`: the number of the cache, whose batch says what belongs together."""
        made = self._model(
            input_ids=ids[None], position_ids=positions[None], logits_to_keep=keep, use_cache=False, paged=cache
        )
        logits: torch.Tensor = made.logits[0]
        return logits

    @cached_property
    def compiled(self) -> Callable[[torch.Tensor, torch.Tensor, Any, int], torch.Tensor]:
        """The same as few kernels. The tuning reads weights at the memory's full speed for a single token."""
        function: Callable[[torch.Tensor, torch.Tensor, Any, int], torch.Tensor] = torch.compile(
            self.__call__, options={"coordinate_descent_tuning": True}
        )

        def run(ids: torch.Tensor, positions: torch.Tensor, keep: Any, cache: int) -> torch.Tensor:
            if ids.shape[0] > 1:  # one token is traced by itself, all other numbers of them at once
                for tensor in (ids, positions):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return function(ids, positions, keep, cache)

        return run
