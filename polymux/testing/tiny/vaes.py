"""Image, video and audio autoencoders, shrunken."""

from __future__ import annotations

from typing import Any

import diffusers as D
import torch


def vae_kl(
    latents: int = 16, quant: bool = False, scaling: float = 0.3611, shift: float | None = 0.1159
) -> D.AutoencoderKL:
    """The 8x SD-family image VAE (Flux, SD3, Z-Image, ...), 1/16 of its width or less."""
    return D.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=latents,
        block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
        scaling_factor=scaling,
        shift_factor=shift,
        force_upcast=False,
        sample_size=64,
    )


def vae_qwen(**kw: Any) -> D.AutoencoderKLQwenImage:
    return D.AutoencoderKLQwenImage(base_dim=4, z_dim=16, num_res_blocks=1, **kw)


def vae_wan() -> D.AutoencoderKLWan:
    return D.AutoencoderKLWan(base_dim=4, z_dim=16, num_res_blocks=1)


def vae_wan22_ti2v() -> D.AutoencoderKLWan:
    """Wan 2.2 TI2V-5B's 16x16x4 VAE: 48 latent channels, residual blocks, 2x2 pixel patches."""
    g = torch.Generator().manual_seed(48)
    return D.AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=6,
        z_dim=48,
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
        latents_mean=(0.2 * torch.randn(48, generator=g)).tolist(),
        latents_std=(0.5 + torch.rand(48, generator=g)).tolist(),
    )


def vae_flux2() -> D.AutoencoderKLFlux2:
    return D.AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8, 8), latent_channels=32, layers_per_block=1, norm_num_groups=4, sample_size=64
    )


def vae_hunyuan_video() -> D.AutoencoderKLHunyuanVideo:
    return D.AutoencoderKLHunyuanVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    )


def vae_oobleck(rate: int = 44100) -> D.AutoencoderOobleck:
    return D.AutoencoderOobleck(
        encoder_hidden_size=16,
        downsampling_ratios=[2, 4, 4],
        channel_multiples=[1, 2, 2],
        decoder_channels=8,
        decoder_input_channels=8,
        audio_channels=2,
        sampling_rate=rate,
    )
