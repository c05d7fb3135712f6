"""Speech as continuous frames, which a small network draws and a codec decodes."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as T

from polymux.testing.tiny.files import Files
from polymux.testing.tiny.registry import Ctx, Saveable, Tensors, runner, tiny
from polymux.testing.tiny.tokenizers import llama_tokenizer, qwen_tokenizer, size_of
from polymux.testing.tiny.weights import filled

# Who has a recording is named before the text, with a mark for it; then each speaker's lines.
VIBEVOICE_CHAT = (
    "{%- for m in messages %}{%- for c in m.content if c.type == 'audio' %}"
    "{{ ' Speaker ' + m.role + ':<|vision_start|><|vision_pad|><|vision_end|>\\n' }}{%- endfor %}{%- endfor %}"
    "{%- for m in messages %}{%- for c in m.content if c.type == 'text' %}"
    "{{ ' Speaker ' + m.role + ': ' + c.text + '\\n' }}{%- endfor %}{%- endfor %}{{ '<|vision_start|>' }}"
)
POCKET_CHAT = (
    "{%- for m in messages %}{%- for c in m.content %}"
    "{%- if c.type == 'audio' %}{{ '<|audio_prompt_bos|><|audio_prompt|>' }}{%- else %}{{ c.text }}{%- endif %}"
    "{%- endfor %}{%- endfor %}{{ '<|audio_bos|>' }}"
)
HOP = 16


@tiny("vibevoice", "transformers")
def vibevoice(ctx: Ctx) -> list[Saveable]:
    tok = qwen_tokenizer(chat_template=None)
    ids = tok.convert_tokens_to_ids
    codec = dict(num_filters=4, downsampling_ratios=[2, 2, 4], depths=[1, 1, 1, 1])
    config = T.VibeVoiceConfig(
        text_config=dict(
            model_type="qwen2", vocab_size=size_of(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
        ),
        audio_config=dict(model_type="vibevoice_acoustic_tokenizer", hidden_size=8, **codec),
        semantic_model_config=dict(model_type="vibevoice_acoustic_tokenizer_encoder", hidden_size=12, **codec),
        diffusion_head_config=dict(num_hidden_layers=1, intermediate_size=64, frequency_embedding_size=16),
        pad_token_id=ids("<|endoftext|>"), eos_token_id=ids("<|endoftext|>"),
        audio_bos_token_id=ids("<|vision_start|>"), audio_eos_token_id=ids("<|vision_end|>"),
        audio_token_id=ids("<|vision_pad|>"),
    )
    model = filled(ctx, T.VibeVoiceForConditionalGeneration(config))
    with torch.no_grad():  # so that it goes on for a while: what it reads has a direction, which means to go on
        model.model.language_model.embed_tokens.weight += 1
        model.model.multi_modal_projector.linear_2.bias += 1
        model.lm_head.weight[config.audio_token_id] += 0.3
    how = dict(guidance_scale=1.3, num_diffusion_steps=2, noise_scheduler_class="DPMSolverMultistepScheduler",
               noise_scheduler_config=dict(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction"))
    for name, value in how.items():
        setattr(model.generation_config, name, value)
    features = T.VibeVoiceAcousticTokenizerFeatureExtractor(pad_to_multiple_of=HOP)
    return [model, T.VibeVoiceProcessor(feature_extractor=features, tokenizer=tok, chat_template=VIBEVOICE_CHAT)]


@runner("vibevoice")
def run_vibevoice(path: Path, ctx: Ctx) -> Tensors:
    processor = T.VibeVoiceProcessor.from_pretrained(path)
    model = T.VibeVoiceForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    turn = {"role": "0", "content": [{"type": "text", "text": "hello there"}]}
    inputs = processor.apply_chat_template([turn], tokenize=True, return_dict=True, return_tensors="pt")
    torch.manual_seed(ctx.seed)
    return {"wav": model.generate(**inputs, max_new_tokens=4)[0]}


@tiny("pocket-tts", "transformers")
def pocket_tts(ctx: Ctx) -> list[Saveable]:
    marks = {
        "audio_prompt_token": "<|audio_prompt|>", "audio_latent_token": "<|audio_latent|>",
        "audio_prompt_bos_token": "<|audio_prompt_bos|>", "audio_bos_token": "<|audio_bos|>",
    }  # fmt: skip
    tok = T.PreTrainedTokenizerFast(
        tokenizer_object=llama_tokenizer(list(marks.values())).backend_tokenizer, pad_token="</s>", unk_token="<unk>",
        extra_special_tokens=marks,
    )
    ids = tok.convert_tokens_to_ids
    config = T.PocketTTSConfig(
        vocab_size=size_of(tok), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=512, latent_dim=8, pad_token_id=tok.pad_token_id,
        flow_head_config=dict(hidden_size=16, num_hidden_layers=1, latent_dim=8, condition_dim=32,
                              frequency_embedding_size=16),
        **{f"{name}_id": ids(mark) for name, mark in marks.items()},
    )
    model = filled(ctx, T.PocketTTSForConditionalGeneration(config))
    for name, value in dict(temperature=0.7, do_sample=True, return_dict_in_generate=True).items():
        setattr(model.generation_config, name, value)
    codec = filled(ctx, T.PocketTTSAudioTokenizerModel(T.PocketTTSAudioTokenizerConfig(
        hidden_size=16, num_filters=4, upsampling_ratios=[2, 2], num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, intermediate_size=32, sliding_window=16, upsample_groups=16,
        latent_stride=4, latent_dim=8,
    )), "codec")
    features = T.PocketTTSFeatureExtractor(frame_size=HOP, pad_to_multiple_of=HOP, end_on_pause=False)
    processor = T.PocketTTSProcessor(
        feature_extractor=features, tokenizer=tok, chat_template=POCKET_CHAT, frames_after_eos=1,
        frames_after_eos_short_text=1,
    )
    return [model, processor, Files(lambda path: codec.save_pretrained(path / "audio_tokenizer"))]


@runner("pocket-tts")
def run_pocket_tts(path: Path, ctx: Ctx) -> Tensors:
    codec = T.PocketTTSAudioTokenizerModel.from_pretrained(path / "audio_tokenizer", dtype=ctx.dtype)
    processor = T.PocketTTSProcessor.from_pretrained(path)
    processor.audio_tokenizer = codec
    model = T.PocketTTSForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    inputs = processor(text=["hello there<|audio_bos|>"], return_tensors="pt")
    made = model.generate(**inputs, do_sample=False, max_new_tokens=6)
    return {"wav": processor.decode(made.audio_latents, made.audio_latents_mask)[0]}
