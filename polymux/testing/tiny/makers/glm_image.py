"""GLM-Image: a language model writes what the picture is of as tokens, and a transformer denoises the picture."""

from __future__ import annotations

import diffusers as D
import transformers as T

from polymux.testing.tiny.encoders import t5_encoder
from polymux.testing.tiny.inputs import PROMPT, have_torchvision
from polymux.testing.tiny.registry import Ctx, tiny
from polymux.testing.tiny.schedulers import flow_match
from polymux.testing.tiny.tokenizers import qwen_tokenizer, size_of
from polymux.testing.tiny.vaes import vae_kl
from polymux.testing.tiny.weights import parts

CHAT = (
    "{%- for m in messages %}{{ '<|' + m.role + '|>' }}{%- for c in m.content %}"
    "{{ '<|image_start|><|image|><|image_end|>' if c.type == 'image' else c.text }}{%- endfor %}{%- endfor %}"
)
CODES = 32  # of the language model's pictures; two more tokens begin and end one


# However small a picture is, the language model writes one of some 256 tokens first.
@tiny("glm-image", needs_torchvision=True, prompt=PROMPT, guidance_scale=1.5, width=64, height=64)
def glm_image(ctx: Ctx) -> D.GlmImagePipeline:
    byt5 = T.ByT5Tokenizer()
    vae = vae_kl(shift=None)
    vae.register_to_config(latents_mean=[0.1] * 16, latents_std=[0.9] * 16)
    return D.GlmImagePipeline(**parts(
        ctx, tokenizer=byt5, processor=_processor(), text_encoder=t5_encoder(byt5), vae=vae,
        vision_language_encoder=_language_model(),
        transformer=D.GlmImageTransformer2DModel(
            in_channels=16, out_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            text_embed_dim=32, time_embed_dim=16, condition_dim=8, prior_vq_quantizer_codebook_size=CODES,
        ),
        scheduler=flow_match(1.0, True, base_shift=0.25, max_shift=0.75, base_image_seq_len=256),
    ))


def _tokenizer() -> T.Qwen2Tokenizer:
    names = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    names["bos_token"] = "<|image_start|>"
    marks = ["<|image_end|>", "<|user|>"]
    return qwen_tokenizer([*names.values(), *marks], chat_template=None, padding_side="left", **names)


def _processor() -> T.GlmImageProcessor:
    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    kind = T.GlmImageImageProcessor if have_torchvision() else T.GlmImageImageProcessorPil
    image = kind(patch_size=32, merge_size=1, temporal_patch_size=1, size=size)
    return T.GlmImageProcessor(image, _tokenizer(), chat_template=CHAT)


def _language_model() -> T.GlmImageForConditionalGeneration:
    tok = _tokenizer()
    ids = tok.convert_tokens_to_ids
    config = T.GlmImageConfig(
        text_config=dict(
            vocab_size=size_of(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, vision_vocab_size=CODES + 8, pad_token_id=ids("<|endoftext|>"),
            eos_token_id=CODES + 1, max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        ),
        vision_config=dict(depth=1, hidden_size=32, num_heads=2, image_size=128, patch_size=32, intermediate_size=64),
        vq_config=dict(embed_dim=16, num_embeddings=CODES, latent_channels=32),
        image_token_id=ids("<|image|>"), image_start_token_id=ids("<|image_start|>"),
        image_end_token_id=ids("<|image_end|>"),
    )
    model = T.GlmImageForConditionalGeneration(config)
    model.generation_config.suppress_tokens = list(range(CODES, CODES + 8))  # a trained one does not write these
    return model
