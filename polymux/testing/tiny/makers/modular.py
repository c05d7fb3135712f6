"""Modular pipelines: `modular_model_index.json` in place of `model_index.json`, and no `DiffusionPipeline` class.

How diffusers 0.42 keeps them: `save_pretrained` writes each component into its folder and an index whose entries are
`[library, class, {pretrained_model_name_or_path, subfolder, ...}]`. Published indexes name a hub repository there; a
local save names the folder it was saved to. `ModularPipeline.from_pretrained(folder)` reads the index and builds the
blocks, but no component with weights; an entry whose files lie in `folder` is loaded from there whatever repository it
names, so a folder can be moved. `load_components(dtype=...)` then loads all of them (with `workflow=`, those that one
task needs). It only *logs* a component that fails to load and leaves it None. Guiders and image processors are built
from the blocks' own configs and are not in the index. A pipeline is called with `output="images"` or a list of names;
without, it returns the whole state.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers as D

from polymux.testing.tiny.encoders import qwen3_vl_parts
from polymux.testing.tiny.inputs import NEG, PROMPT, VIDEO
from polymux.testing.tiny.registry import TINY, Ctx, tiny
from polymux.testing.tiny.weights import parts

INDEX = "modular_model_index.json"


class _Published:
    """A modular pipeline that saves itself as if downloaded: the index names a repository, not this folder."""

    def __init__(self, pipe: D.ModularPipeline, repository: str) -> None:
        self._pipe = pipe
        self._repository = repository

    def save_pretrained(self, save_directory: Path, **kwargs: Any) -> None:
        self._pipe.save_pretrained(str(save_directory), overwrite_modular_index=True, **kwargs)
        index = save_directory / INDEX
        here, there = json.dumps(str(save_directory)), json.dumps(self._repository)
        index.write_text(index.read_text(encoding="utf-8").replace(here, there), encoding="utf-8")


def _like(name: str, cls: type[D.ModularPipeline], ctx: Ctx) -> _Published:
    """The modular twin of a diffusers checkpoint, over the same components."""
    pipe = cls()
    components = TINY[name].build(ctx).components
    pipe.update_components(**{key: components[key] for key in pipe.component_names if components.get(key) is not None})
    return _Published(pipe, f"tiny/{name}-modular")


@tiny("qwen-image-modular", "modular", prompt=PROMPT, negative_prompt=NEG, width=64, height=64)
def qwen_image_modular(ctx: Ctx) -> _Published:
    return _like("qwen-image", D.QwenImageModularPipeline, ctx)


@tiny("flux-modular", "modular", prompt=PROMPT, guidance_scale=3.5, width=64, height=64, max_sequence_length=64)
def flux_modular(ctx: Ctx) -> _Published:
    return _like("flux-dev", D.FluxModularPipeline, ctx)


@tiny("wan21-t2v-modular", "modular", **VIDEO, negative_prompt=NEG, max_sequence_length=64)
def wan21_t2v_modular(ctx: Ctx) -> _Published:
    return _like("wan21-t2v", D.WanModularPipeline, ctx)


def _h3_dit() -> D.MiniMaxH3Transformer3DModel:
    return D.MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=16, hidden_size=32, num_layers=2, num_refiner_layers=1, ffn_dim=64,
        in_channels=8, audio_in_channels=8, text_dim=32, freq_dim=32, time_embed_hidden_dim=32, time_embed_dim=16,
        rope_freq_dim=2,
    )


# its shortest video has five seconds, 124 frames; of n steps it runs the denoiser in n - 1
@tiny(
    "minimax-h3", "modular", needs_torchvision=True, prompt=PROMPT, width=32, height=32, num_frames=124,
    num_inference_steps=3,
)
def minimax_h3(ctx: Ctx) -> _Published:
    tok, lm, processor = qwen3_vl_parts(layers=51)  # it reads hidden state 50
    pipe = D.MiniMaxH3ModularPipeline()
    pipe.update_components(**parts(
        ctx, text_encoder=lm, tokenizer=tok, processor=processor, transformer=_h3_dit(), transformer_ref=_h3_dit(),
        vae=D.AutoencoderKLMiniMaxH3(
            latent_channels=8, block_out_channels=(8,) * 6, layers_per_block=1, norm_num_groups=4,
            decoder_num_layers=1, decoder_num_attention_heads=2, decoder_attention_head_dim=16,
            decoder_num_register_tokens=2, decoder_ffn_mult=2, latents_mean=(0.1,) * 8, latents_std=(0.9,) * 8,
        ),
        audio_vae=D.AutoencoderKLMiniMaxH3Audio(  # 40 latents a second, as the pipeline assumes
            encoder_dim=8, encoder_rates=(2, 4, 5), latent_dim=32, latent_channels=8, num_attention_heads=2,
            decoder_dim=16, decoder_rates=(5, 4, 2), decoder_kernel_sizes=(9, 8, 4), resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1, 3),), sampling_rate=1600, latents_mean=[0.1] * 8, latents_std=[0.9] * 8,
        ),
        scheduler=D.MiniMaxH3Scheduler(shift=12.0), audio_scheduler=D.MiniMaxH3Scheduler(shift=3.0),
    ))
    return _Published(pipe, "tiny/minimax-h3")
