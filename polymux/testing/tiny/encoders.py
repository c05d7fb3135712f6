"""Text and vision encoders, shrunken, with the processors that go with them."""

from __future__ import annotations

from typing import Any

import transformers as T

from polymux.testing.tiny.inputs import have_torchvision
from polymux.testing.tiny.tokenizers import CHATML, qwen_tokenizer, size_of

QWEN_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1000000.0}
QWEN3_ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 5000000.0, "mrope_interleaved": True}


def _decoder(tok: T.PreTrainedTokenizerBase, layers: int, **kw: Any) -> dict[str, Any]:
    """The config of a small language model, as most of them spell it."""
    base = dict(
        vocab_size=size_of(tok),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
    return base | kw


def _vision_tokens(tok: T.Qwen2Tokenizer) -> dict[str, int]:
    ids = tok.convert_tokens_to_ids
    return dict(
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )


def qwen25_vl(tok: T.Qwen2Tokenizer, layers: int = 2, vision: int = 32) -> T.Qwen2_5_VLForConditionalGeneration:
    ids = tok.convert_tokens_to_ids
    config = T.Qwen2_5_VLConfig(
        text_config=_decoder(
            tok,
            layers,
            rope_parameters=QWEN_ROPE,
            bos_token_id=0,
            eos_token_id=ids("<|im_end|>"),
            pad_token_id=ids("<|endoftext|>"),
        ),
        vision_config=dict(
            depth=2,
            hidden_size=vision,
            intermediate_size=2 * vision,
            num_heads=2,
            out_hidden_size=32,
            patch_size=14,
            spatial_merge_size=2,
            temporal_patch_size=2,
            window_size=112,
            fullatt_block_indexes=[1],
        ),
        **_vision_tokens(tok),
    )
    return T.Qwen2_5_VLForConditionalGeneration(config)


def qwen2vl_processor(tok: T.Qwen2Tokenizer) -> T.Qwen2VLProcessor:
    image = T.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
    video = T.Qwen2VLVideoProcessor(min_pixels=28 * 28, max_pixels=56 * 56) if have_torchvision() else None
    return T.Qwen2VLProcessor(
        image_processor=image, tokenizer=tok, video_processor=video, chat_template=tok.chat_template
    )


def qwen3_config(tok: T.Qwen2Tokenizer, layers: int = 2) -> T.Qwen3Config:
    eos = tok.convert_tokens_to_ids("<|im_end|>")
    return T.Qwen3Config(**_decoder(tok, layers, head_dim=16, eos_token_id=eos, tie_word_embeddings=True))


def clip_text(tok: T.CLIPTokenizer, with_projection: bool = False, act: str = "quick_gelu") -> T.PreTrainedModel:
    config = T.CLIPTextConfig(
        vocab_size=size_of(tok),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=32,
        hidden_act=act,
        bos_token_id=tok.bos_token_id,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
    )
    cls = T.CLIPTextModelWithProjection if with_projection else T.CLIPTextModel
    return cls(config)


def t5_encoder(tok: T.PreTrainedTokenizerBase, hidden: int = 32, umt5: bool = False) -> T.PreTrainedModel:
    kw: dict[str, Any] = dict(
        vocab_size=size_of(tok),
        d_model=hidden,
        d_kv=hidden // 2,
        d_ff=2 * hidden,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=32,
        feed_forward_proj="gated-gelu",
    )
    if umt5:
        return T.UMT5EncoderModel(T.UMT5Config(**kw))
    return T.T5EncoderModel(T.T5Config(**kw))


def clip_vision() -> T.CLIPVisionModel:
    config = T.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        projection_dim=32,
        hidden_act="gelu",
    )
    return T.CLIPVisionModel(config)


def clip_image_processor() -> T.CLIPImageProcessor:
    return T.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def qwen3_vl_parts(
    layers: int,
) -> tuple[T.Qwen2Tokenizer, T.Qwen3VLForConditionalGeneration, T.Qwen3VLProcessor | None]:
    """Tokenizer, model, and the processor where torchvision can be imported."""
    tok = qwen_tokenizer()
    config = T.Qwen3VLConfig(
        text_config=_decoder(tok, layers, head_dim=16, rope_parameters=QWEN3_ROPE),
        vision_config=dict(
            depth=2,
            hidden_size=32,
            intermediate_size=64,
            num_heads=2,
            out_hidden_size=32,
            patch_size=16,
            spatial_merge_size=2,
            temporal_patch_size=2,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        ),
        **_vision_tokens(tok),
        tie_word_embeddings=True,
    )
    processor = None
    if have_torchvision():
        processor = T.Qwen3VLProcessor(
            image_processor=T.Qwen2VLImageProcessor(patch_size=16, min_pixels=32 * 32, max_pixels=64 * 64),
            tokenizer=tok,
            video_processor=T.Qwen3VLVideoProcessor(),
            chat_template=CHATML,
        )
    return tok, T.Qwen3VLForConditionalGeneration(config), processor


MISTRAL_SPECIAL = ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
MISTRAL_CHAT = (
    "{{ bos_token }}{%- for m in messages %}{%- set o = '[SYSTEM_PROMPT]' if m.role == 'system' else '[INST]' %}"
    "{%- set e = '[/SYSTEM_PROMPT]' if m.role == 'system' else '[/INST]' %}{{ o }}"
    "{%- if m.content is string %}{{ m.content }}{%- else %}{%- for c in m.content %}"
    "{%- if c.type == 'image' %}[IMG]{%- elif 'text' in c %}{{ c.text }}{%- endif %}{%- endfor %}{%- endif %}{{ e }}"
    "{%- endfor %}"
)


def mistral3_config(tok: T.LlamaTokenizer, layers: int) -> T.Mistral3Config:
    return T.Mistral3Config(
        text_config=T.MistralConfig(**_decoder(tok, layers, head_dim=16)),
        vision_config=T.PixtralVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=56,
            patch_size=14,
            head_dim=16,
        ),
        image_token_index=tok.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )


def gemma2(tok: T.GemmaTokenizer) -> T.Gemma2Model:
    return T.Gemma2Model(
        T.Gemma2Config(**_decoder(tok, 2, head_dim=16, max_position_embeddings=2048, sliding_window=64))
    )
