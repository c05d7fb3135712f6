"""Puts block-sparse attention into the layers of a denoiser that a family says see a video.

The layers stay what they are: while one runs, its call of torch's scaled_dot_product_attention is answered here. Until
the step from which it is to be, and for what has nothing to leave out, nothing is done at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from polymux.attention import BlockSparse
from polymux.diffusion.block_sparse import Tokens, attend, choose, leaves_out
from polymux.diffusion.call import Call
from polymux.errors import ConfigError, GenerationError
from polymux.families.video_tokens import VideoTokens


class SparseLayers:
    """Of one denoiser."""

    def __init__(self, module: Any, known: VideoTokens, settings: BlockSparse) -> None:
        self.module, self.known, self.settings = module, known, settings
        layers = [layer for path, layer in module.named_modules() if re.fullmatch(known.layers, path)]
        self.total = len(layers)
        for index in settings.skip_layers:
            if index >= len(layers):
                message = f"block_sparse: skip_layers: there is no layer {index}; there are {len(layers)}"
                raise ConfigError(message, param="diffusion_attention_config")
        self.layers = [layer for index, layer in enumerate(layers) if index not in settings.skip_layers]
        self._tokens: Tokens | None = None  # of the call that runs; None: nothing is left out
        self._inside: list[ExitStack] = []  # what is to be undone when a layer has run
        self._handles: list[RemovableHandle] = []
        for layer in self.layers:
            self._handles.append(layer.register_forward_pre_hook(self._enter))
            self._handles.append(layer.register_forward_hook(self._leave, always_call=True))

    @contextmanager
    def active(self, call: Call) -> Iterator[None]:
        """Around a run of `call`."""
        if call.place is not None and call.place.step >= self.settings.start_step:
            tokens = self._tokens_of(call.arguments)
            self._tokens = tokens if leaves_out(tokens, self.settings.sparsity) else None
        try:
            yield
        finally:
            self._tokens = None

    def undo(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _tokens_of(self, arguments: dict[str, Any]) -> Tokens:
        """Of the video; how much text there is, the layers see."""
        if self.known.frames is None:
            frames, height, width = (int(arguments[name]) for name in ("num_frames", "height", "width"))
            return Tokens(video=frames * height * width, frame=height * width)
        shape = arguments["hidden_states"].shape
        patch = _patch(self.module.config)
        sizes = (shape[self.known.frames], *shape[-2:])
        frames, height, width = (size // step for size, step in zip(sizes, patch, strict=True))
        return Tokens(video=frames * height * width, frame=height * width)

    def _enter(self, layer: Any, args: Any) -> None:
        undoing = ExitStack()
        self._inside.append(undoing)
        if self._tokens is None:
            return
        if hasattr(layer.processor, "_attention_backend"):
            chosen = layer.processor._attention_backend
            undoing.callback(setattr, layer.processor, "_attention_backend", chosen)
            layer.processor._attention_backend = AttentionBackendName.NATIVE  # the one that calls torch's
        undoing.enter_context(Redirection(self._tokens, self.known, self.settings.sparsity))

    def _leave(self, layer: Any, args: Any, output: Any) -> None:
        self._inside.pop().close()


class Redirection(TorchFunctionMode):
    """While a layer runs: its attention over the video is block-sparse."""

    def __init__(self, video: Tokens, known: VideoTokens, sparsity: float) -> None:
        super().__init__()
        self.video, self.known, self.sparsity = video, known, sparsity

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        length, text = query.shape[2], query.shape[2] - self.video.video
        if key.shape[2] != length or text < 0 or (text > 0) != (self.known.text != "none"):
            raise GenerationError(f"block_sparse: {length} tokens are not a video of {self.video.video} and text")
        if others.get("is_causal") or others.get("dropout_p") or others.get("enable_gqa"):
            raise GenerationError("block_sparse: this layer's attention is of a kind that it does not do")
        tokens = Tokens(self.video.video, self.video.frame, text, self.known.text == "before")
        mask = None if attn_mask is None else _of_keys(attn_mask, length)
        choice = choose(query, key, tokens, self.sparsity)
        return attend(query, key, value, choice, mask, others.get("scale"))


def _of_keys(mask: torch.Tensor, length: int) -> torch.Tensor:
    """[batch, tokens], of one that is the same for all heads and queries."""
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1) or mask.shape[3] != length:
        raise GenerationError(f"block_sparse: masks of shape {tuple(mask.shape)} are not of keys alone")
    return mask[:, 0, 0]


def _patch(config: Any) -> tuple[int, int, int]:
    """Latent positions that become one token: frames, height, width."""
    size = config["patch_size"]
    if isinstance(size, int):
        return config.get("patch_size_t") or 1, size, size
    frames, height, width = size
    return frames, height, width
