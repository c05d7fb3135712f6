"""The network that makes a vector of a recorded voice: ECAPA-TDNN, on the spectrogram of the recording.

(Desplanques et al., "ECAPA-TDNN: Emphasized Channel Attention, Propagation and Aggregation in TDNN Based Speaker
Verification", 2020.)
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad
from transformers.audio_utils import mel_filter_bank

from polymux.models.qwen3_tts.configs import Values

Tensor = torch.Tensor
SAMPLE_RATE, FFT, HOP = 24000, 1024, 256
_DEFAULTS: Values = {
    "mel_dim": 128,
    "enc_dim": 1024,
    "enc_channels": [512, 512, 512, 512, 1536],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 128,
    "enc_res2net_scale": 8,
    "enc_se_channels": 128,
    "sample_rate": SAMPLE_RATE,
}


def spectrogram(samples: Tensor, bands: int) -> Tensor:
    """Logarithms of mel bands (rows, bands, n) of samples (rows, samples) at SAMPLE_RATE."""
    edge = (FFT - HOP) // 2
    padded = pad(samples[:, None], (edge, edge), mode="reflect")[:, 0]
    window = torch.hann_window(FFT, device=samples.device)
    waves = torch.stft(padded, FFT, HOP, FFT, window, center=False, return_complex=True)
    filters = mel_filter_bank(FFT // 2 + 1, bands, 0.0, SAMPLE_RATE / 2, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
    power = (torch.view_as_real(waves).square().sum(-1) + 1e-9).sqrt()
    return torch.from_numpy(filters.T).to(power).matmul(power).clamp(min=1e-5).log()


def _conv(inside: int, out: int, kernel: int = 1, dilation: int = 1) -> torch.nn.Conv1d:
    return torch.nn.Conv1d(inside, out, kernel, dilation=dilation, padding="same", padding_mode="reflect")


class Delays(torch.nn.Module):
    """A convolution over time."""

    def __init__(self, inside: int, out: int, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = _conv(inside, out, kernel, dilation)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.conv(x).relu()
        return made


class Res2Net(torch.nn.Module):
    """Groups of channels, each of which is given what the one before it has made."""

    def __init__(self, channels: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        width = channels // scale
        self.blocks = torch.nn.ModuleList(Delays(width, width, kernel, dilation) for _ in range(scale - 1))

    def forward(self, x: Tensor) -> Tensor:
        made = list(x.chunk(len(self.blocks) + 1, dim=1))
        for i, block in enumerate(self.blocks, 1):
            made[i] = block(made[i] if i == 1 else made[i] + made[i - 1])
        return torch.cat(made, dim=1)


class Excitation(torch.nn.Module):
    """Each channel as loud as the means of all say."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _conv(channels, inner), _conv(inner, channels)

    def forward(self, x: Tensor) -> Tensor:
        loud: Tensor = self.conv2(self.conv1(x.mean(2, keepdim=True)).relu()).sigmoid()
        return x * loud


class Block(torch.nn.Module):
    """The three of them, between two layers over channels."""

    def __init__(self, inside: int, out: int, values: Values, kernel: int, dilation: int) -> None:
        super().__init__()
        self.tdnn1, self.tdnn2 = Delays(inside, out), Delays(out, out)
        self.res2net_block = Res2Net(out, values["enc_res2net_scale"], kernel, dilation)
        self.se_block = Excitation(out, values["enc_se_channels"])

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))
        return made


class Pooling(torch.nn.Module):
    """Mean and deviation over time, where attention says how much each moment counts."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.tdnn, self.conv = Delays(3 * channels, inner), _conv(inner, channels)

    def forward(self, x: Tensor) -> Tensor:
        even = torch.full_like(x, 1 / x.shape[2])
        around = [part.expand_as(x) for part in _moments(x, even)]
        weights = self.conv(self.tdnn(torch.cat([x, *around], dim=1)).tanh()).softmax(2)
        return torch.cat(_moments(x, weights), dim=1)


def _moments(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = (weights * x).sum(2, keepdim=True)
    return mean, (weights * (x - mean).square()).sum(2, keepdim=True).clamp(min=1e-12).sqrt()


class SpeakerEncoder(torch.nn.Module):
    """See `vector`."""

    def __init__(self, given: Values) -> None:
        super().__init__()
        values = _DEFAULTS | given
        if values["sample_rate"] != SAMPLE_RATE:
            raise ValueError(f"sample_rate={values['sample_rate']} of a speaker encoder is not known")
        widths, kernels, dilations = (values[f"enc_{name}"] for name in ("channels", "kernel_sizes", "dilations"))
        self.bands = values["mel_dim"]
        inner = range(1, len(widths) - 1)
        blocks = [Block(widths[i - 1], widths[i], values, kernels[i], dilations[i]) for i in inner]
        self.blocks = torch.nn.ModuleList([Delays(self.bands, widths[0], kernels[0], dilations[0]), *blocks])
        self.mfa = Delays(widths[-1], widths[-1], kernels[-1], dilations[-1])
        self.asp = Pooling(widths[-1], values["enc_attention_channels"])
        self.fc = _conv(2 * widths[-1], values["enc_dim"])

    def vector(self, samples: Tensor) -> Tensor:
        """(channels) of a recording (samples) at SAMPLE_RATE."""
        x = spectrogram(samples[None].float(), self.bands).to(self.fc.weight.dtype)
        made = []
        for block in self.blocks:
            x = block(x)
            made.append(x)
        vector: Tensor = self.fc(self.asp(self.mfa(torch.cat(made[1:], dim=1))))
        return vector[0, :, 0]
