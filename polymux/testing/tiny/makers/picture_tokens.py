"""Janus and Emu3: they read text and pictures, and write text, or pictures as tokens."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as T

from polymux.testing.tiny.inputs import have_torchvision
from polymux.testing.tiny.registry import Ctx, Saveable, Tensors, runner, tiny
from polymux.testing.tiny.tokenizers import llama_tokenizer, qwen_tokenizer, size_of
from polymux.testing.tiny.weights import filled

JANUS_CHAT = (
    "{%- for m in messages %}{{ {'user': '<|User|>: ', 'assistant': '<|Assistant|>: '}.get(m.role, '') }}"
    "{%- for c in m.content %}{{ '<image_placeholder>\\n' if c.type == 'image' else c.text }}{%- endfor %}"
    "{{ '\\n\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|Assistant|>:' }}{%- endif %}"
)
EMU3_CHAT = (
    "{%- for m in messages %}{{ m.role | upper + ': ' }}{%- for c in m.content %}"
    "{{ '<image>' if c.type == 'image' else c.text }}{%- endfor %}{{ ' ' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{%- endif %}"
)


@tiny("janus", "transformers")
def janus(ctx: Ctx) -> list[Saveable]:
    names = {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
    tok = llama_tokenizer([*names.values(), "<|User|>", "<|Assistant|>"], **names)
    ids = tok.convert_tokens_to_ids
    config = T.JanusConfig(
        text_config=T.LlamaConfig(
            vocab_size=size_of(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=512, pad_token_id=2,
        ).to_dict() | {"model_type": "llama"},
        vision_config=dict(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8, projection_dim=32,
            num_image_tokens=16, depth=2, mlp_ratio=2.0,
        ),
        vq_config=dict(
            embed_dim=8, num_embeddings=32, latent_channels=32, base_channels=32, channel_multiplier=[1, 1],
            num_res_blocks=1, num_patches=4, projection_dim=32, image_token_embed_dim=32, num_hidden_layers=2,
        ),
        image_token_id=ids("<image_placeholder>"),
    )
    model = filled(ctx, T.JanusForConditionalGeneration(config))
    model.generation_config.generation_kwargs = {"boi_token_id": ids("<begin_of_image>")}
    model.generation_config.pad_token_id = 2
    model.generation_config.bos_token_id = 1
    model.generation_config.guidance_scale = 5
    half = [0.5, 0.5, 0.5]
    kind = T.JanusImageProcessor if have_torchvision() else T.JanusImageProcessorPil
    image = kind(size={"height": 32, "width": 32}, image_mean=half, image_std=half)
    return [model, T.JanusProcessor(image, tok, chat_template=JANUS_CHAT, num_image_tokens=16)]


@runner("janus")
def run_janus(path: Path, ctx: Ctx) -> Tensors:
    processor = T.AutoProcessor.from_pretrained(path)
    model = T.JanusForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    model.generation_config.generation_kwargs = {"boi_token_id": processor.tokenizer.boi_token_id}  # loading drops it
    inputs = processor(text="a red cat", generation_mode="image", return_tensors="pt")
    ids = model.generate(**inputs, generation_mode="image", do_sample=False, guidance_scale=3.0)
    with torch.no_grad():
        image = model.decode_image_tokens(ids)
    return {"ids": ids, "image": image}


@tiny("emu3", "transformers")
def emu3(ctx: Ctx) -> list[Saveable]:
    names = {
        "image_token": "<image>", "boi_token": "<|image start|>", "eoi_token": "<|image end|>",
        "image_wrapper_token": "<|image token|>", "eof_token": "<|extra_201|>",
    }
    codes = 32
    visual = [f"<|visual token {i:06d}|>" for i in range(codes)]
    tok = qwen_tokenizer(
        [*names.values(), "<|extra_200|>", "<|extra_203|>", "<|extra_204|>"], chat_template=None, padding_side="left",
        bos_token="<|extra_203|>", pad_token="<|endoftext|>", **names | {"eos_token": "<|extra_204|>"},
    )
    tok.add_tokens(visual)
    ids = tok.convert_tokens_to_ids
    text = dict(
        vocab_size=size_of(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, pad_token_id=ids("<|endoftext|>"),
        bos_token_id=ids("<|extra_203|>"), eos_token_id=ids("<|extra_204|>"),
    )
    pictures = dict(
        codebook_size=codes, base_channels=32, channel_multiplier=[1, 1, 1, 1], num_res_blocks=1, hidden_size=32,
        attn_resolutions=[3], temporal_downsample_factor=4,
    )
    known = {name: ids(name) for name in (*visual, *names.values(), "<|extra_200|>")}
    config = T.Emu3Config(vq_config=pictures, text_config=text, vocabulary_map=known)
    model = filled(ctx, T.Emu3ForConditionalGeneration(config))
    settings = model.generation_config
    settings.bos_token_id, settings.eos_token_id = ids("<|extra_203|>"), ids("<|extra_204|>")
    settings.pad_token_id, settings.guidance_scale = ids("<|endoftext|>"), 3.0
    settings.do_sample, settings.top_k = True, 2048
    image = T.Emu3ImageProcessor(min_pixels=32 * 32, max_pixels=64 * 64)
    return [model, T.Emu3Processor(image, tok, chat_template=EMU3_CHAT)]


@runner("emu3")
def run_emu3(path: Path, ctx: Ctx) -> Tensors:
    processor = T.AutoProcessor.from_pretrained(path)
    model = T.Emu3ForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    chat = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": "a red cat"}]}], add_generation_prompt=True
    )
    inputs = processor(text=chat, return_tensors="pt")
    return {"ids": model.generate(**inputs, do_sample=False, max_new_tokens=8, guidance_scale=None)}
