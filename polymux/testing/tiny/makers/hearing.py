"""Speech in, text out."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as T

from polymux.testing.tiny.inputs import tone
from polymux.testing.tiny.registry import Ctx, Saveable, Tensors, runner, tiny
from polymux.testing.tiny.tokenizers import CHATML, llama_tokenizer, qwen_tokenizer, size_of, whisper_tokenizer
from polymux.testing.tiny.weights import filled

CANARY_CHAT = (
    "{%- for m in messages %}{%- for c in m.content if c.type == 'text' %}<|hear|>{{ c.source_language }}"
    "<|write|>{{ c.target_language }}<|begin|>{%- endfor %}{%- endfor %}"
)
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


@tiny("moonshine", "transformers")
def moonshine(ctx: Ctx) -> list[Saveable]:
    tok = llama_tokenizer()
    config = T.MoonshineConfig(
        vocab_size=size_of(tok), hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=2, decoder_num_attention_heads=2,
        max_position_embeddings=24, bos_token_id=1, eos_token_id=2, pad_token_id=2, decoder_start_token_id=1,
    )
    model = filled(ctx, T.MoonshineForConditionalGeneration(config))
    features = T.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    return [model, T.Wav2Vec2Processor(feature_extractor=features, tokenizer=tok)]


@runner("moonshine")
def run_moonshine(path: Path, ctx: Ctx) -> Tensors:
    processor = T.Wav2Vec2Processor.from_pretrained(path)
    model = T.MoonshineForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    inputs = processor(tone(1.0, 16000), sampling_rate=16000, return_tensors="pt").to(dtype=ctx.dtype)
    return {"ids": model.generate(**inputs, max_new_tokens=8)}


def _parakeet(ctx: Ctx, kind: str) -> list[Saveable]:
    spelled = llama_tokenizer(["<blank>"])
    tok = T.ParakeetTokenizer(tokenizer_object=spelled.backend_tokenizer, unk_token="<unk>", pad_token="</s>")
    tok.add_special_tokens({"additional_special_tokens": ["<blank>"]})
    shared = dict(vocab_size=len(tok), pad_token_id=tok.pad_token_id, encoder_config=dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_mel_bins=16,
        subsampling_conv_channels=8, max_position_embeddings=64,
    ))
    blank = tok.convert_tokens_to_ids("<blank>")
    writes = dict(decoder_hidden_size=32, num_decoder_layers=1, blank_token_id=blank, max_symbols_per_step=3)
    if kind == "ctc":
        model = filled(ctx, T.ParakeetForCTC(T.ParakeetCTCConfig(**shared)))
    elif kind == "rnnt":
        model = filled(ctx, T.ParakeetForRNNT(T.ParakeetRNNTConfig(**shared, **writes)))
        model.generation_config.decoder_start_token_id = blank
    else:
        model = filled(ctx, T.ParakeetForTDT(T.ParakeetTDTConfig(**shared, **writes, durations=[0, 1, 2])))
        model.generation_config.decoder_start_token_id = blank
        model.generation_config.suppress_tokens = [len(tok) + i for i in range(3)]  # the durations
    features = T.ParakeetFeatureExtractor(feature_size=16)
    return [model, T.ParakeetProcessor(feature_extractor=features, tokenizer=tok, decoder_type=kind)]


@tiny("parakeet-ctc", "transformers")
def parakeet_ctc(ctx: Ctx) -> list[Saveable]:
    return _parakeet(ctx, "ctc")


@tiny("parakeet-tdt", "transformers")
def parakeet_tdt(ctx: Ctx) -> list[Saveable]:
    return _parakeet(ctx, "tdt")


@tiny("parakeet-rnnt", "transformers")
def parakeet_rnnt(ctx: Ctx) -> list[Saveable]:
    return _parakeet(ctx, "rnnt")


@runner("parakeet-ctc")
@runner("parakeet-tdt")
@runner("parakeet-rnnt")
def run_parakeet(path: Path, ctx: Ctx) -> Tensors:
    processor = T.ParakeetProcessor.from_pretrained(path)
    kinds = {"ctc": T.ParakeetForCTC, "tdt": T.ParakeetForTDT, "rnnt": T.ParakeetForRNNT}
    model = kinds[processor.decoder_type].from_pretrained(path, dtype=ctx.dtype)
    inputs = processor(tone(1.0, 16000), sampling_rate=16000).to(dtype=ctx.dtype)
    return {"ids": model.generate(**inputs, return_dict_in_generate=True).sequences}


@tiny("qwen3-asr", "transformers")
def qwen3_asr(ctx: Ctx) -> list[Saveable]:
    marks = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    tok = qwen_tokenizer(list(marks.values()), chat_template=CHATML, **marks)
    tok.add_tokens(["<asr_text>"])
    ids = tok.convert_tokens_to_ids
    config = T.Qwen3ASRConfig(
        audio_config=dict(
            num_mel_bins=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, d_model=32,
            output_dim=32, downsample_hidden_size=8,
        ),
        text_config=dict(
            model_type="qwen3", vocab_size=size_of(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=512,
            tie_word_embeddings=True,
        ),
        audio_token_id=ids("<|AUDIO|>"), pad_token_id=ids("<|endoftext|>"),
        eos_token_id=[ids("<|endoftext|>"), ids("<|im_end|>")],
    )
    features = T.Qwen3ASRFeatureExtractor(feature_size=16)
    return [filled(ctx, T.Qwen3ASRForConditionalGeneration(config)), T.Qwen3ASRProcessor(
        feature_extractor=features, tokenizer=tok, chat_template=CHATML,
    )]


@runner("qwen3-asr")
def run_qwen3_asr(path: Path, ctx: Ctx) -> Tensors:
    processor = T.Qwen3ASRProcessor.from_pretrained(path)
    model = T.Qwen3ASRForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    inputs = processor.apply_transcription_request(audio=[tone(1.0, 16000)], language="en").to(dtype=ctx.dtype)
    return {"ids": model.generate(**inputs, max_new_tokens=6)}


@tiny("canary", "transformers")
def canary(ctx: Ctx) -> list[Saveable]:
    marks = ["<|hear|>", "<|write|>", "<|begin|>"]
    tok = llama_tokenizer(marks)
    tok.add_special_tokens({"additional_special_tokens": marks})
    width = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = T.CanaryConfig(
        vocab_size=size_of(tok), pad_token_id=tok.pad_token_id, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
        encoder_config=dict(
            model_type="parakeet_encoder", num_mel_bins=16, subsampling_conv_channels=8, max_position_embeddings=64,
            **width,
        ),
        decoder_config=dict(
            vocab_size=size_of(tok), num_key_value_heads=2, head_dim=16, max_position_embeddings=96,
            pad_token_id=tok.pad_token_id, bos_token_id=1, eos_token_id=2, **width,
        ),
    )
    features = T.ParakeetFeatureExtractor(feature_size=16)
    return [filled(ctx, T.CanaryForConditionalGeneration(config)), T.CanaryProcessor(
        feature_extractor=features, tokenizer=tok, chat_template=CANARY_CHAT,
    )]


@runner("canary")
def run_canary(path: Path, ctx: Ctx) -> Tensors:
    processor = T.CanaryProcessor.from_pretrained(path)
    model = T.CanaryForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    inputs = processor.apply_transcription_request(audio=[tone(1.0, 16000)]).to(dtype=ctx.dtype)
    return {"ids": model.generate(**inputs, max_new_tokens=6)}
