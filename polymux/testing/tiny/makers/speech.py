"""Speech and music by next-token prediction, and VITS."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
import transformers as T

from polymux.testing.tiny.files import Files
from polymux.testing.tiny.inputs import tone
from polymux.testing.tiny.makers.codecs import dac_config, encodec_config, mimi_config
from polymux.testing.tiny.registry import Ctx, Saveable, Tensors, runner, tiny
from polymux.testing.tiny.tokenizers import llama_tokenizer, qwen_tokenizer, size_of, t5_tokenizer
from polymux.testing.tiny.weights import filled

CSM_CHAT = (
    "{%- for m in messages %}{{ '<|begin_of_text|>[' + m.role + ']' + m.content[0].text + '<|end_of_text|>' }}"
    "{%- if m.content | length > 1 %}{{ '<|AUDIO|><|audio_eos|>' }}{%- endif %}{%- endfor %}"
)

HIGGS_CHAT = (
    "{{ bos_token }}{%- for m in messages %}{{ '[' + m.role + ']' }}{%- for c in m.content %}"
    "{%- if c.type == 'text' %}{{ c.text }}{%- else %}{{ '<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>' }}{%- endif %}"
    "{%- endfor %}{{ '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|audio_out_bos|>' }}{%- endif %}"
)


@tiny("csm", "transformers")
def csm(ctx: Ctx) -> list[Saveable]:
    tok = qwen_tokenizer(["<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>"], chat_template=None)
    ids = tok.convert_tokens_to_ids
    books, codes = 4, 32
    config = T.CsmConfig(
        num_codebooks=books, vocab_size=2 * codes, text_vocab_size=size_of(tok), hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=512,
        pad_token_id=ids("<|endoftext|>"), codebook_pad_token_id=codes + 2, codebook_eos_token_id=0,
        bos_token_id=ids("<|begin_of_text|>"), audio_token_id=ids("<|AUDIO|>"), audio_eos_token_id=ids("<|audio_eos|>"),
        depth_decoder_config=dict(
            num_codebooks=books, backbone_hidden_size=32, vocab_size=2 * codes, hidden_size=32, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
            max_position_embeddings=books + 1,
        ),
        # as many codes as the model writes: with random weights it writes special ones too, and any may be heard
        codec_config=mimi_config(books, 2 * codes).to_dict(),
    )
    model = filled(ctx, T.CsmForConditionalGeneration(config))
    processor = T.CsmProcessor(
        feature_extractor=T.EncodecFeatureExtractor(feature_size=1, sampling_rate=24000), tokenizer=tok,
        chat_template=CSM_CHAT,
    )
    return [model, processor]


@runner("csm")
def run_csm(path: Path, ctx: Ctx) -> Tensors:
    processor = T.AutoProcessor.from_pretrained(path)
    model = T.CsmForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    inputs = processor("<|begin_of_text|>[0]hello there<|end_of_text|>", add_special_tokens=False, return_tensors="pt")
    kw = dict(do_sample=False, depth_decoder_do_sample=False, max_new_tokens=8)
    codes = model.generate(**inputs, **kw)
    wav = model.generate(**inputs, **kw, output_audio=True)[0]
    return {"codes": codes, "wav": wav}


@tiny("dia", "transformers")
def dia(ctx: Ctx) -> list[Saveable]:
    books, codes = 4, 32
    config = T.DiaConfig(
        encoder_config=dict(
            max_position_embeddings=64, num_hidden_layers=2, hidden_size=32, num_attention_heads=2,
            num_key_value_heads=2, head_dim=16, intermediate_size=64, vocab_size=256,
        ),
        decoder_config=dict(
            max_position_embeddings=128, num_hidden_layers=2, hidden_size=32, intermediate_size=64,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, cross_num_attention_heads=2, cross_head_dim=16,
            cross_num_key_value_heads=2, cross_hidden_size=32, vocab_size=codes + 4, num_channels=books,
            eos_token_id=codes, pad_token_id=codes + 1, bos_token_id=codes + 2,
        ),
        delay_pattern=[0, 1, 2, 3], eos_token_id=codes, pad_token_id=codes + 1, bos_token_id=codes + 2,
    )
    model = filled(ctx, T.DiaForConditionalGeneration(config))
    codec = filled(ctx, T.DacModel(dac_config(books, codes)), "codec")
    # the published processor names its codec by hub id; here it lies in a folder of the checkpoint
    tok = T.DiaTokenizer()
    features = T.DiaFeatureExtractor(feature_size=1, sampling_rate=44100, hop_length=32)
    return [model, tok, features, Files(lambda path: codec.save_pretrained(path / "audio_tokenizer"))]


@runner("dia")
def run_dia(path: Path, ctx: Ctx) -> Tensors:
    codec = T.DacModel.from_pretrained(path / "audio_tokenizer", dtype=ctx.dtype)
    processor = T.DiaProcessor(
        feature_extractor=T.DiaFeatureExtractor.from_pretrained(path), tokenizer=T.DiaTokenizer.from_pretrained(path),
        audio_tokenizer=codec,
    )
    model = T.DiaForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    names = dict(eos_token_id=32, pad_token_id=33, bos_token_id=34, delay_pattern=[0, 1, 2, 3])
    inputs = processor(text=["[S1] hello there."], padding=True, return_tensors="pt", **names)
    ids = model.generate(**inputs, do_sample=False, guidance_scale=3.0, top_k=16, max_new_tokens=24)
    wav = processor.batch_decode(ids, **{k: v for k, v in names.items() if k != "eos_token_id"})[0]
    return {"ids": ids, "wav": wav.float()}


@tiny("bark", "transformers")
def bark(ctx: Ctx) -> list[Saveable]:
    codec = encodec_config()
    base = dict(block_size=256, num_layers=2, num_heads=2, hidden_size=32, bias=False)
    sem_vocab, codes = 64, codec.codebook_size
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *ascii_lowercase, *("##" + c for c in ascii_lowercase)]
    tok = T.BertTokenizer(vocab={w: i for i, w in enumerate(words)})
    config = T.BarkConfig(
        semantic_config=dict(input_vocab_size=2 * sem_vocab + 128, output_vocab_size=sem_vocab + 8, **base),
        coarse_acoustics_config=dict(
            input_vocab_size=sem_vocab + 2 * codes + 8, output_vocab_size=sem_vocab + 2 * codes + 8, **base,
        ),
        fine_acoustics_config=dict(
            input_vocab_size=codes + 8, output_vocab_size=codes + 8, n_codes_total=4, n_codes_given=1, **base,
        ),
        codec_config=codec.to_dict(),
    )
    return [filled(ctx, T.BarkModel(config)), tok, Files(lambda path: _bark_generation_file(path, sem_vocab, codes))]


def _bark_generation_file(path: Path, sem_vocab: int, codes: int) -> None:
    from transformers.models.bark.generation_configuration_bark import BarkGenerationConfig

    generation = BarkGenerationConfig(
        semantic_config=dict(
            eos_token_id=sem_vocab, semantic_pad_token=sem_vocab, semantic_vocab_size=sem_vocab,
            semantic_infer_token=2 * sem_vocab + 120, text_encoding_offset=sem_vocab + 1,
            text_pad_token=2 * sem_vocab + 110, max_input_semantic_length=32, max_new_tokens=24, do_sample=False,
            semantic_rate_hz=49.9,
        ),
        coarse_acoustics_config=dict(
            coarse_semantic_pad_token=sem_vocab + 2 * codes + 6, coarse_infer_token=sem_vocab + 2 * codes + 7,
            n_coarse_codebooks=2, coarse_rate_hz=75, max_coarse_input_length=32, max_coarse_history=64,
            sliding_window_len=12, do_sample=False,
        ),
        fine_acoustics_config=dict(
            max_fine_history_length=64, max_fine_input_length=128, n_fine_codebooks=4, temperature=1.0,
        ),
        sample_rate=24000, codebook_size=codes,
    )
    # BarkGenerationConfig.save_pretrained fails in transformers 5.24 (no attribute 'early_stopping')
    keep = {
        key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        for key, value in generation.to_dict().items()
    }
    (path / "generation_config.json").write_text(json.dumps(keep, indent=2))


@runner("bark")
def run_bark(path: Path, ctx: Ctx) -> Tensors:
    model = T.BarkModel.from_pretrained(path, dtype=ctx.dtype)
    tok = T.AutoTokenizer.from_pretrained(path)
    ids = tok("hello there", padding="max_length", max_length=32, return_tensors="pt")
    wav = model.generate(input_ids=ids.input_ids, attention_mask=ids.attention_mask, semantic_max_new_tokens=24)
    return {"wav": wav}


@tiny("musicgen", "transformers")
def musicgen(ctx: Ctx) -> list[Saveable]:
    tok, codec, parts = _musicgen_parts()
    model = _told_how(filled(ctx, T.MusicgenForConditionalGeneration(T.MusicgenConfig(
        **parts, decoder=T.MusicgenDecoderConfig(**_musicgen_decoder(codec)).to_dict(),
    ))), codec)
    features = T.EncodecFeatureExtractor(feature_size=1, sampling_rate=32000)
    return [model, T.MusicgenProcessor(feature_extractor=features, tokenizer=tok)]


@tiny("musicgen-melody", "transformers")
def musicgen_melody(ctx: Ctx) -> list[Saveable]:
    tok, codec, parts = _musicgen_parts()
    model = _told_how(filled(ctx, T.MusicgenMelodyForConditionalGeneration(T.MusicgenMelodyConfig(
        **parts, decoder=T.MusicgenMelodyDecoderConfig(**_musicgen_decoder(codec)).to_dict(), chroma_length=5,
    ))), codec)
    return [model, tok]


def _musicgen_parts() -> tuple[Any, T.EncodecConfig, dict[str, Any]]:
    tok, codec = t5_tokenizer(), encodec_config(32000)
    t5 = T.T5Config(
        vocab_size=size_of(tok), d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        relative_attention_num_buckets=8, feed_forward_proj="relu",
    )
    return tok, codec, dict(text_encoder=t5.to_dict(), audio_encoder=codec.to_dict())


def _musicgen_decoder(codec: T.EncodecConfig) -> dict[str, Any]:
    return dict(
        vocab_size=codec.codebook_size, max_position_embeddings=128, num_hidden_layers=2, ffn_dim=64,
        num_attention_heads=2, hidden_size=32, num_codebooks=4, dropout=0.0, pad_token_id=codec.codebook_size,
        bos_token_id=codec.codebook_size,
    )


def _told_how(model: Any, codec: T.EncodecConfig) -> Any:
    model.generation_config.decoder_start_token_id = model.generation_config.pad_token_id = codec.codebook_size
    model.generation_config.guidance_scale = 3.0
    return model


@runner("musicgen-melody")
def run_musicgen_melody(path: Path, ctx: Ctx) -> Tensors:
    model = T.MusicgenMelodyForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    inputs = T.AutoTokenizer.from_pretrained(path)(["music with drums"], return_tensors="pt")
    return {"wav": model.generate(**inputs, do_sample=False, max_new_tokens=16)}


@runner("musicgen")
def run_musicgen(path: Path, ctx: Ctx) -> Tensors:
    model = T.MusicgenForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    processor = T.AutoProcessor.from_pretrained(path)
    inputs = processor(text=["music with drums"], padding=True, return_tensors="pt")
    return {"wav": model.generate(**inputs, do_sample=False, max_new_tokens=16)}


@tiny("vits", "transformers")
def vits(ctx: Ctx) -> list[Saveable]:
    letters = ["<pad>", " ", *ascii_lowercase, "<unk>"]
    config = T.VitsConfig(
        vocab_size=len(letters) + 3, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
        flow_size=16, spectrogram_bins=33, upsample_initial_channel=32, upsample_rates=[8, 8],
        upsample_kernel_sizes=[16, 16], resblock_kernel_sizes=[3, 5], resblock_dilation_sizes=[[1, 3], [1, 3]],
        duration_predictor_filter_channels=16, prior_encoder_num_wavenet_layers=2,
        posterior_encoder_num_wavenet_layers=2, num_speakers=2, speaker_embedding_size=8,
    )
    model = filled(ctx, T.VitsModel(config))

    def vocab(path: Path) -> None:
        (path / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(letters)}))
        T.VitsTokenizer(str(path / "vocab.json"), phonemize=False).save_pretrained(path)

    return [model, Files(vocab)]


@runner("vits")
def run_vits(path: Path, ctx: Ctx) -> Tensors:
    model, tok = T.VitsModel.from_pretrained(path, dtype=ctx.dtype), T.VitsTokenizer.from_pretrained(path)
    torch.manual_seed(ctx.seed)
    with torch.no_grad():
        return {"wav": model(**tok("hello there", return_tensors="pt"), speaker_id=1).waveform}


@tiny("speecht5-tts", "transformers")
def speecht5_tts(ctx: Ctx) -> list[Saveable]:
    config = T.SpeechT5Config(
        vocab_size=48, hidden_size=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_layers=2, decoder_ffn_dim=64, decoder_attention_heads=2, num_mel_bins=20,
        speech_decoder_prenet_units=16, speaker_embedding_dim=8, speech_decoder_postnet_units=16,
        speech_decoder_postnet_layers=2, reduction_factor=2, speech_decoder_prenet_dropout=0.0,
    )
    model = filled(ctx, T.SpeechT5ForTextToSpeech(config))
    gan = filled(ctx, T.SpeechT5HifiGan(T.SpeechT5HifiGanConfig(
        model_in_dim=20, upsample_initial_channel=32, upsample_rates=[4, 4], upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]],
    )), "vocoder")
    # the published checkpoint's vocoder is a repository of its own; here it lies in a folder of the checkpoint
    return [model, Files(lambda path: gan.save_pretrained(path / "vocoder")), Files(_speecht5_tokenizer)]


def _speecht5_tokenizer(path: Path) -> None:
    from sentencepiece import SentencePieceTrainer

    signs = f"{ascii_lowercase}{ascii_lowercase[:8].upper()}.,'"
    with (path / "spm_char.model").open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter([" ".join(signs), signs]), model_writer=file, model_type="char",
            vocab_size=len(signs) + 5, bos_id=0, pad_id=1, eos_id=2, unk_id=3, character_coverage=1.0,
            hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
    T.SpeechT5Tokenizer(str(path / "spm_char.model")).save_pretrained(path)


@runner("speecht5-tts")
def run_speecht5_tts(path: Path, ctx: Ctx) -> Tensors:
    model = T.SpeechT5ForTextToSpeech.from_pretrained(path, dtype=ctx.dtype)
    gan = T.SpeechT5HifiGan.from_pretrained(path / "vocoder", dtype=ctx.dtype)
    ids = torch.arange(5, 15)[None]
    wav = model.generate_speech(ids, torch.ones(1, 8, dtype=ctx.dtype), vocoder=gan, threshold=2.0, maxlenratio=4.0)
    return {"wav": wav}


@tiny("moshi", "transformers")
def moshi(ctx: Ctx) -> list[Saveable]:
    config = T.MoshiConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, head_dim=16,
        num_codebooks=4, audio_vocab_size=32, max_position_embeddings=256, sliding_window=64,
        audio_encoder_config=mimi_config(8, 32).to_dict(),
        depth_decoder_config=dict(
            vocab_size=64, hidden_size=32, input_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
            audio_vocab_size=32, ffn_dim=64, num_codebooks=4, max_position_embeddings=5, sliding_window=4,
        ),
    )
    model = filled(ctx, T.MoshiForConditionalGeneration(config))
    return [model]


@runner("moshi")
def run_moshi(path: Path, ctx: Ctx) -> Tensors:
    model = T.MoshiForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    user, moshi = torch.zeros(1, 1, 480, dtype=ctx.dtype), torch.from_numpy(tone(0.02, 24000))[None, None].to(ctx.dtype)
    out = model.generate(
        input_ids=torch.ones(1, 10, dtype=torch.long), user_input_values=user, moshi_input_values=moshi,
        max_new_tokens=6, do_sample=False, depth_decoder_do_sample=False, concat_unconditional_inputs=False,
    )
    return {"ids": out.sequences, "wav": out.audio_sequences}


@tiny("higgs-audio-v2", "transformers")
def higgs_audio_v2(ctx: Ctx) -> list[Saveable]:
    delay = "<|reserved_special_token_6|>"
    marks = ["<|AUDIO|>", "<|AUDIO_OUT|>", "<|audio_out_bos|>", "<|audio_eos|>", "<|eot_id|>", delay]
    tok = llama_tokenizer(marks)
    tok.add_special_tokens({"additional_special_tokens": marks})
    ids = tok.convert_tokens_to_ids
    config = T.HiggsAudioV2Config(
        vocab_size=size_of(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, pad_token_id=tok.pad_token_id, bos_token_id=1,
        eos_token_id=ids("<|eot_id|>"), num_codebooks=4, codebook_size=34, audio_token_id=ids("<|AUDIO_OUT|>"),
        audio_bos_token_id=ids("<|audio_out_bos|>"), audio_delay_token_id=ids(delay),
        audio_stream_bos_id=32, audio_stream_eos_id=33,
    )
    model = filled(ctx, T.HiggsAudioV2ForConditionalGeneration(config))
    for name, value in dict(ras_win_len=7, ras_win_max_num_repeat=2, max_length=None).items():
        setattr(model.generation_config, name, value)
    tok.chat_template = HIGGS_CHAT
    features = T.DacFeatureExtractor(feature_size=1, sampling_rate=24000, hop_length=1)
    settings = dict(processor_class="HiggsAudioV2Processor", audio_stream_bos_id=32, audio_stream_eos_id=33)

    def write(path: Path) -> None:
        (path / "processor_config.json").write_text(json.dumps(settings))

    return [model, tok, features, Files(write), *([Files(_higgs_codec(ctx))] if find_spec("torchaudio") else [])]


def _higgs_codec(ctx: Ctx) -> Callable[[Path], None]:
    """In transformers there is none without torchaudio."""
    config = T.HiggsAudioV2TokenizerConfig(
        target_bandwidths=[1.0], codebook_size=32, codebook_dim=8,
        acoustic_model_config=dict(
            model_type="dac", encoder_hidden_size=4, downsampling_ratios=[8, 5, 4, 3], upsampling_ratios=[8, 5, 4, 3],
            decoder_hidden_size=32, hidden_size=16,
        ),
        semantic_model_config=dict(
            model_type="hubert", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            conv_dim=[8] * 7, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        ),
    )
    codec = filled(ctx, T.HiggsAudioV2TokenizerModel(config), "codec")
    return lambda path: codec.save_pretrained(path / "audio_tokenizer")


@runner("higgs-audio-v2")
def run_higgs_audio_v2(path: Path, ctx: Ctx) -> Tensors:
    tok = T.AutoTokenizer.from_pretrained(path)
    model = T.HiggsAudioV2ForConditionalGeneration.from_pretrained(path, dtype=ctx.dtype)
    ids = tok("hello there<|eot_id|><|audio_out_bos|>", return_tensors="pt")
    out = model.generate(**ids, do_sample=False, max_new_tokens=12)
    return {"codes": out if torch.is_tensor(out) else out.sequences}
