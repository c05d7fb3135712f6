"""A plain language model, and Janus, which writes pictures as tokens."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as T

from polymux.testing.tiny.encoders import qwen3_config
from polymux.testing.tiny.inputs import PROMPT
from polymux.testing.tiny.registry import Ctx, Saveable, Tensors, runner, tiny
from polymux.testing.tiny.tokenizers import TOOLS_CHATML, llama_tokenizer, qwen_tokenizer, size_of
from polymux.testing.tiny.weights import filled


@tiny("qwen3-lm", "transformers")
def qwen3_lm(ctx: Ctx) -> list[Saveable]:
    tok = qwen_tokenizer(chat_template=TOOLS_CHATML)
    return [filled(ctx, T.Qwen3ForCausalLM(qwen3_config(tok))), tok]


@runner("qwen3-lm")
def run_qwen3_lm(path: Path, ctx: Ctx) -> Tensors:
    tok = T.AutoTokenizer.from_pretrained(path)
    model = T.AutoModelForCausalLM.from_pretrained(path, dtype=ctx.dtype)
    ids = tok(PROMPT, return_tensors="pt").input_ids
    return {"ids": model.generate(ids, do_sample=False, max_new_tokens=16, eos_token_id=None)}


@tiny("janus", "transformers")
def janus(ctx: Ctx) -> list[Saveable]:
    tok = llama_tokenizer(["<image_placeholder>", "<begin_of_image>", "<end_of_image>"])
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
    return [model, tok]


@runner("janus")
def run_janus(path: Path, ctx: Ctx) -> Tensors:
    tok = T.AutoTokenizer.from_pretrained(path)
    model = T.JanusForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    model.generation_config.generation_kwargs = {"boi_token_id": tok.convert_tokens_to_ids("<begin_of_image>")}
    inputs = tok(["a red cat"], return_tensors="pt")
    inputs = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    ids = model.generate(**inputs, generation_mode="image", do_sample=False, guidance_scale=3.0)
    with torch.no_grad():
        image = model.decode_image_tokens(ids[:, -16:])
    return {"ids": ids, "image": image}
