"""Speech in, text out."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as T

from polymux.testing.tiny.inputs import tone
from polymux.testing.tiny.registry import Ctx, Saveable, Tensors, runner, tiny
from polymux.testing.tiny.tokenizers import size_of, whisper_tokenizer
from polymux.testing.tiny.weights import filled

SECONDS = 2  # of one window; the published ones have 30


@tiny("whisper", "transformers")
def whisper(ctx: Ctx) -> list[Saveable]:
    languages = ("en", "de", "ja")
    tok = whisper_tokenizer(languages, SECONDS)
    ids = tok.convert_tokens_to_ids
    end = ids("<|endoftext|>")
    config = T.WhisperConfig(
        vocab_size=size_of(tok), num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=SECONDS * 50, max_target_positions=48, bos_token_id=end, eos_token_id=end,
        pad_token_id=end, decoder_start_token_id=ids("<|startoftranscript|>"), begin_suppress_tokens=None,
    )
    model = filled(ctx, T.WhisperForConditionalGeneration(config))
    how = dict(
        is_multilingual=True, lang_to_id={f"<|{code}|>": ids(f"<|{code}|>") for code in languages},
        task_to_id={task: ids(f"<|{task}|>") for task in ("transcribe", "translate")},
        no_timestamps_token_id=ids("<|notimestamps|>"), prev_sot_token_id=ids("<|startofprev|>"),
        max_initial_timestamp_index=50, max_length=12, suppress_tokens=[], begin_suppress_tokens=[end],
        return_timestamps=False, _from_model_config=False,
    )
    for name, value in how.items():
        setattr(model.generation_config, name, value)
    features = T.WhisperFeatureExtractor(feature_size=16, sampling_rate=16000, chunk_length=SECONDS)
    return [model, T.WhisperProcessor(feature_extractor=features, tokenizer=tok)]


@runner("whisper")
def run_whisper(path: Path, ctx: Ctx) -> Tensors:
    processor = T.WhisperProcessor.from_pretrained(path)
    model = T.WhisperForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    heard = torch.as_tensor(tone(1.0, 16000)).reshape(-1).numpy()
    inputs = processor(heard, sampling_rate=16000, return_tensors="pt")
    ids = model.generate(inputs.input_features.to(ctx.dtype), language="en", max_new_tokens=8)
    return {"ids": ids}
