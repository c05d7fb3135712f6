"""The codec of 12.5 frames per second: from codes to samples, a part at a time, and from a recording to codes.

A part comes with what was kept of the parts before, and gives what is to be kept; so a stream's samples are those of
the whole. Knows nothing of who wrote the codes.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import embedding
from transformers import MimiConfig, MimiModel, PreTrainedModel

from polymux.models.memory import Memory
from polymux.models.qwen3_tts.causal import CausalConv, CausalUpsampling, ConvNeXt, Snake, UpsamplingBlock
from polymux.models.qwen3_tts.configs import Qwen3TTSTokenizerV2Config, Values
from polymux.models.qwen3_tts.window import WindowLayers

Tensor = torch.Tensor
Kept = tuple[Tensor, ...]
_DECODING = {"decoder", "decoder_transformer", "upsample"}  # parts of a MimiModel


class Codebook(torch.nn.Module):
    """Vectors of codes, as sums over so many uses."""

    def __init__(self, codes: int, channels: int) -> None:
        super().__init__()
        self.cluster_usage = torch.nn.Parameter(torch.ones(codes))
        self.embedding_sum = torch.nn.Parameter(torch.zeros(codes, channels))

    def forward(self, codes: Tensor) -> Tensor:
        return embedding(codes, self.embedding_sum / self.cluster_usage.clamp(min=1e-5)[:, None])


class _Named(torch.nn.Module):
    """A holder, for the names that parameters have in checkpoints."""

    def __init__(self, **children: torch.nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Quantizer(torch.nn.Module):
    """Some layers of codes, whose vectors are added up."""

    def __init__(self, layers: int, codes: int, channels: int, out: int) -> None:
        super().__init__()
        books = [_Named(_codebook=Codebook(codes, channels)) for _ in range(layers)]
        self.vq = _Named(layers=torch.nn.ModuleList(books))
        self.input_proj = torch.nn.Conv1d(out, channels, 1, bias=False)  # unused here; checkpoints have it
        self.output_proj = torch.nn.Conv1d(channels, out, 1, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        """(rows, layers, n) to (rows, channels, n)."""
        books = [layer.get_submodule("_codebook") for layer in self.vq.get_submodule("layers").children()]
        vectors = [book(column) for book, column in zip(books, codes.unbind(1), strict=True)]
        made: Tensor = self.output_proj(torch.stack(vectors).sum(0).transpose(1, 2))
        return made


class Decoder(torch.nn.Module):
    """Codes to samples."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        width, latent, wide = values["codebook_dim"], values["latent_dim"], values["decoder_dim"]
        codes, rates = values["codebook_size"], values["upsample_rates"]
        self.layers = values["num_quantizers"]
        self.hop = math.prod(rates) * math.prod(values["upsampling_ratios"])
        one, rest = (Quantizer(count, codes, width // 2, width) for count in (1, self.layers - 1))
        self.quantizer = _Named(rvq_first=one, rvq_rest=rest)
        self.pre_conv = CausalConv(width, latent, 3)
        self.pre_transformer = WindowLayers(values)
        pairs = [(CausalUpsampling(latent, latent, f, f), ConvNeXt(latent)) for f in values["upsampling_ratios"]]
        self.upsample = torch.nn.ModuleList(torch.nn.ModuleList(pair) for pair in pairs)
        widths = [wide // 2**i for i in range(len(rates) + 1)]
        blocks = [UpsamplingBlock(widths[i], widths[i + 1], rate) for i, rate in enumerate(rates)]
        ends = [Snake(widths[-1]), CausalConv(widths[-1], 1, 7)]
        self.decoder = torch.nn.ModuleList([CausalConv(latent, wide, 7), *blocks, *ends])

    def forward(self, codes: Tensor, kept: Kept) -> tuple[Tensor, Kept]:
        """(rows, layers, n) to (rows, 1, n * hop)."""
        first = kept[0] if kept else codes.new_zeros(len(codes), 1)
        memory = Memory(kept[1] if kept else None)
        one, rest = self.quantizer.get_submodule("rvq_first"), self.quantizer.get_submodule("rvq_rest")
        x = self.pre_conv(one(codes[:, :1]) + rest(codes[:, 1:]), memory)
        x = self.pre_transformer(x.transpose(1, 2), first, memory).transpose(1, 2)
        for layer in (*(layer for pair in self.upsample for layer in pair), *self.decoder):  # type: ignore[attr-defined]
            x = layer(x, memory)
        return x.clamp(-1, 1), (first + codes.shape[2], memory.new())


class Qwen3TTSTokenizerV2Model(PreTrainedModel):  # type: ignore[misc]
    """As published checkpoints name it."""

    config_class = Qwen3TTSTokenizerV2Config
    base_model_prefix = "model"
    main_input_name = "codes"

    def __init__(self, config: Qwen3TTSTokenizerV2Config) -> None:
        super().__init__(config)
        self.decoder = Decoder(config.decoder_config)
        self.encoder = MimiModel(MimiConfig(**config.encoder_config))
        for name in _DECODING & self.encoder._modules.keys():  # in versions of transformers; checkpoints lack them
            self.encoder._modules[name] = None
        self.post_init()

    @property
    def hop(self) -> int:
        """Samples of a frame."""
        return self.decoder.hop

    def encode(self, samples: Tensor) -> Tensor:
        """Codes (layers, n) of a recording (samples) at the codec's rate; the last frame may be shorter."""
        coded = self.encoder.encode(samples[None, None].to(self.device, self.dtype)).audio_codes
        made: Tensor = coded[0, : self.config.encoder_valid_num_quantizers]
        return made

    def decode(self, codes: Tensor, kept: Kept = ()) -> tuple[Tensor, Kept]:
        """Samples (rows, 1, n * hop) of the next n frames, codes (rows, layers, n), and what the next part needs."""
        made: tuple[Tensor, Kept] = self.decoder(codes.to(self.device), kept)
        return made
