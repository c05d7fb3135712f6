"""Training-speed forwards over the pipeline's own modules: the same numbers, fewer and larger kernels.

- the autoencoder on still pictures: its causal 3-D convolutions see zeros before the only frame, hence they are 2-D
  convolutions with the kernel of the last frame;
- the text encoder: the template before the caption is the same for all, so it runs once, not once per caption;
- the denoiser: rotary tables are real and belong to samples, so that pictures of several shapes share one batch, short
  ones padded and masked.

Nothing here owns weights. `tests/unit/training` holds each forward against the class it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers as D
import torch
import torch.nn.functional as F
import transformers as T
from torch import Tensor, nn

Run = Callable[..., Tensor]
Layer = Any  # a module of the libraries, with attributes of its own


# --- autoencoder


def norm_act(x: Tensor, bias: Tensor | None, gamma: Tensor) -> Tensor:
    """RMS norm over channels, then SiLU, of `x` plus the bias that its convolution left out. All (channels, 1, 1)."""
    wide = x.float() if bias is None else x.float() + bias
    scale = x.shape[1] ** 0.5 / torch.linalg.vector_norm(wide, dim=1, keepdim=True).clamp(min=1e-12)
    return F.silu(wide * scale * gamma).to(x.dtype)


def joined(short: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    """The end of a residual block."""
    return (short.float() + x.float() + bias).to(x.dtype)


class StillVAE:
    """`encode` gives mean and log variance, `decode` unclamped pictures; both on (batch, channels, height, width).

    Kernels are 2-D copies of their own: train `hidden` and `others`, then `store` writes them into the autoencoder.
    """

    def __init__(self, vae: D.AutoencoderKLQwenImage) -> None:
        self.vae = vae
        self.norm_act: Run = norm_act
        self.joined: Run = joined
        named = {n: m for n, m in vae.named_modules() if isinstance(m, nn.Conv3d) and "time_conv" not in n}
        self.kernels = {m: nn.Parameter(self._flat(m)) for m in named.values()}
        ends = [m for n, m in named.items() if "conv_in" in n or "conv_out" in n]
        flat = [m.weight for m in vae.modules() if isinstance(m, nn.Conv2d)]
        for weight in flat:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        self.hidden = [k for m, k in self.kernels.items() if m not in ends] + flat
        three_d = {m.weight for m in self.kernels}
        taken = {*self.hidden, *three_d}
        rest = [p for n, p in vae.named_parameters() if p not in taken and "time_conv" not in n]
        self.others = [self.kernels[m] for m in ends] + rest

    @staticmethod
    def _flat(layer: nn.Conv3d) -> Tensor:
        return layer.weight[:, :, -1].detach().clone(memory_format=torch.channels_last)

    def of_decoder(self) -> set[nn.Parameter]:
        """What turns latents into pictures."""
        modules = [*self.vae.decoder.modules(), self.vae.post_quant_conv]
        kernels = {self.kernels[m] for m in modules if m in self.kernels}
        return kernels | {p for m in modules for p in m.parameters(recurse=False)}

    @torch.no_grad()
    def store(self) -> None:
        for layer, kernel in self.kernels.items():
            layer.weight[:, :, -1] = kernel

    def _conv(self, layer: nn.Conv3d, x: Tensor, bias: bool = True) -> Tensor:
        """A causal 3-D convolution on one frame. Pictures' three channels become eight: odd numbers are slow."""
        kernel, padding = self.kernels[layer], (layer.kernel_size[1] - 1) // 2
        if layer.in_channels == 3:
            kernel, x = F.pad(kernel, (0, 0, 0, 0, 0, 5)), F.pad(x, (0, 0, 0, 0, 0, 5))
        if layer.out_channels == 3:
            kernel = F.pad(kernel, (0, 0, 0, 0, 0, 0, 0, 5))
            return F.conv2d(x, kernel, None, padding=padding)[:, :3] + layer.bias[:, None, None]
        x = x.contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, kernel, layer.bias if bias else None, padding=padding)

    def _resnet(self, block: Layer, x: Tensor) -> Tensor:
        short = x if isinstance(block.conv_shortcut, nn.Identity) else self._conv(block.conv_shortcut, x)
        h = self._conv(block.conv1, self.norm_act(x, None, block.norm1.gamma[:, 0]), bias=False)
        h = self.norm_act(h, block.conv1.bias[:, None, None], block.norm2.gamma[:, 0])
        return self.joined(short, self._conv(block.conv2, h, bias=False), block.conv2.bias[:, None, None])

    def _middle(self, block: Layer, x: Tensor) -> Tensor:
        x = self._resnet(block.resnets[0], x)
        for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            x = self._resnet(resnet, attention(x.unsqueeze(2)).squeeze(2))
        return x

    def _walk(self, module: Layer, x: Tensor) -> Tensor:
        kind = type(module).__name__
        if kind == "QwenImageResidualBlock":
            return self._resnet(module, x)
        if kind == "QwenImageResample":
            first, conv = module.resample
            return conv(F.interpolate(x, scale_factor=2.0) if module.mode.startswith("up") else first(x))
        if kind == "QwenImageUpBlock":
            for resnet in module.resnets:
                x = self._resnet(resnet, x)
            return x if module.upsamplers is None else self._walk(module.upsamplers[0], x)
        raise TypeError(f"the autoencoder has a block of an unexpected kind: {kind}")

    def _head(self, part: Layer, x: Tensor) -> Tensor:
        return self._conv(part.conv_out, self.norm_act(x, None, part.norm_out.gamma[:, 0]))

    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        encoder = self.vae.encoder
        x = self._conv(encoder.conv_in, pictures)
        for block in encoder.down_blocks:
            x = self._walk(block, x)
        x = self._head(encoder, self._middle(encoder.mid_block, x))
        mean, log_variance = self._conv(self.vae.quant_conv, x).float().chunk(2, dim=1)
        return mean, log_variance.clamp(-30, 20)

    def decode(self, latents: Tensor) -> Tensor:
        decoder = self.vae.decoder
        x = self._middle(decoder.mid_block, self._conv(decoder.conv_in, self._conv(self.vae.post_quant_conv, latents)))
        for block in decoder.up_blocks:
            x = self._walk(block, x)
        return self._head(decoder, x)


def pack(latents: Tensor) -> Tensor:
    """(batch, channels, height, width) to tokens (batch, height/2 * width/2, 4 * channels), as the pipeline does."""
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


# --- text encoder


def _rms(x: Tensor, norm: Layer) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)) * norm.weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the two-halves kind; x is (batch, tokens, heads, dim), tables (tokens, 1, dim / 2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def text_layer(
    layer: Layer, x: Tensor, rotary: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None, mask: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One decoder layer over (batch, tokens, width); `past` keys and values are of batch 1. Returns its own, too."""
    attn = layer.self_attn
    dim = attn.head_dim
    h = _rms(x, layer.input_layernorm)
    q, k, v = (p(h).unflatten(-1, (-1, dim)) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
    q, k = _rotate(q, *rotary), _rotate(k, *rotary)
    keys, values = k, v
    if past is not None:
        keys, values = (torch.cat([p.expand(x.shape[0], -1, -1, -1), n], 1) for p, n in zip(past, (k, v), strict=True))
    groups = q.shape[2] // k.shape[2]
    keys, values = (t.transpose(1, 2).expand(-1, q.shape[2] if t.shape[2] == 1 else -1, -1, -1) for t in (keys, values))
    if keys.shape[1] != q.shape[2]:
        keys, values = (t.repeat_interleave(groups, dim=1) for t in (keys, values))
    h = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
    x = x + attn.o_proj(h.transpose(1, 2).flatten(2))
    h = _rms(x, layer.post_attention_layernorm)
    x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
    return x, (k, v)


@dataclass
class TextEncoder:
    """Captions that follow `template` (token ids): (batch, tokens) ids to (batch, tokens, width) embeddings."""

    model: T.Qwen2_5_VLForConditionalGeneration
    template: Tensor
    layer: Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]] = text_layer

    def __call__(self, ids: Tensor) -> Tensor:
        text = self.model.model.language_model
        n, m = self.template.shape[0], ids.shape[1]
        inv = text.rotary_emb.inv_freq.float()
        angles = torch.arange(n + m, device=ids.device).float()[:, None, None] * inv
        cos, sin = angles.cos(), angles.sin()
        causal = torch.ones(n + m, n + m, dtype=torch.bool, device=ids.device).tril()
        head, x = text.embed_tokens(self.template[None]), text.embed_tokens(ids)
        for layer in text.layers:
            head, past = text_layer(layer, head, (cos[:n], sin[:n]), None, causal[:n, :n])
            x, _ = self.layer(layer, x, (cos[n:], sin[n:]), past, causal[n:])
        return _rms(x, text.norm)


# --- denoiser


class JointAttention:
    """An attention processor for (text, image) tokens with real rotary tables per sample and a mask over all tokens.

    `image_rotary_emb` is (cos, sin), each (batch, tokens, 1, dim / 2), neighbouring channels forming a pair.
    """

    def __call__(
        self,
        attn: Layer,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
        attention_mask: None = None,
    ) -> tuple[Tensor, Tensor]:
        split = encoder_hidden_states.shape[1]
        dim = attn.inner_dim // attn.heads

        def heads(projection: Layer, x: Tensor, norm: Layer | None) -> Tensor:
            y = projection(x).unflatten(-1, (-1, dim))
            return y if norm is None else norm(y)

        text, image = encoder_hidden_states, hidden_states
        q = torch.cat([heads(attn.add_q_proj, text, attn.norm_added_q), heads(attn.to_q, image, attn.norm_q)], 1)
        k = torch.cat([heads(attn.add_k_proj, text, attn.norm_added_k), heads(attn.to_k, image, attn.norm_k)], 1)
        v = torch.cat([heads(attn.add_v_proj, text, None), heads(attn.to_v, image, None)], 1)
        q, k = (_rotate_pairs(t, *image_rotary_emb).to(v.dtype).transpose(1, 2) for t in (q, k))
        mask = encoder_hidden_states_mask[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), attn_mask=mask).transpose(1, 2).flatten(2)
        return attn.to_out[0](out[:, split:]), attn.to_add_out(out[:, :split])


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def rotary_tables(
    model: D.QwenImageTransformer2DModel, grids: list[tuple[int, int]], text: int
) -> tuple[Tensor, Tensor]:
    """cos and sin for each (height, width) grid of tokens: (grids, text + largest grid, dim / 2), padded with zeros."""
    device = next(model.parameters()).device
    most = max(h * w for h, w in grids)
    rows = []
    for h, w in grids:
        image, words = model.pos_embed([[(1, h, w)]], max_txt_seq_len=text, device=device)
        rows.append(F.pad(torch.view_as_real(torch.cat([words, image])), (0, 0, 0, 0, 0, most - h * w)))
    table = torch.stack(rows)
    return table[..., 0].contiguous(), table[..., 1].contiguous()


def run_block(
    block: Layer, x: Tensor, words: Tensor, mask: Tensor, time: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """One block of the denoiser: (words, image). A function, so that one compiled version serves all blocks."""
    result: tuple[Tensor, Tensor] = block(
        hidden_states=x,
        encoder_hidden_states=words,
        encoder_hidden_states_mask=mask,
        temb=time,
        image_rotary_emb=rotary,
    )
    return result


@dataclass
class Denoiser:
    """The velocity (noise minus picture) of packed latents. Sets the model's attention processors when made.

    Returns what the image tokens are after two thirds of the blocks, too, for a side task of training.
    """

    model: D.QwenImageTransformer2DModel
    block: Callable[..., tuple[Tensor, Tensor]] = run_block

    def __post_init__(self) -> None:
        if not all(isinstance(p, JointAttention) for p in self.model.attn_processors.values()):
            self.model.set_attn_processor(JointAttention())

    def __call__(
        self, latents: Tensor, sigma: Tensor, text: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """latents (batch, tokens, channels), sigma (batch,), text (batch, words, width), mask (batch, words + tokens).

        `rotary` holds cos and sin, each (batch, words + tokens, 1, dim / 2). The result is shaped like latents.
        """
        model = self.model
        x = model.img_in(latents)
        words = model.txt_in(model.txt_norm(text))
        time = model.time_text_embed(sigma, x)
        middle, late = x, len(model.transformer_blocks) * 2 // 3
        for number, block in enumerate(model.transformer_blocks, start=1):
            words, x = self.block(block, x, words, mask, time, rotary)
            middle = x if number == late else middle
        return model.proj_out(model.norm_out(x, time)), middle
