"""The configs of the published checkpoints, as they are on disk: what is nested stays a plain mapping."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, Qwen3Config

Values = dict[str, Any]


class Qwen3TTSConfig(PreTrainedConfig):  # type: ignore[misc]
    """config.json of the model."""

    model_type = "qwen3_tts"

    def __init__(
        self,
        talker_config: Values | None = None,
        speaker_encoder_config: Values | None = None,
        tts_model_type: str | None = None,
        **rest: Any,
    ) -> None:
        self.talker_config, self.speaker_encoder_config = talker_config or {}, speaker_encoder_config or {}
        self.tts_model_type = tts_model_type
        self.tts_model_size = rest.pop("tts_model_size", None)
        for name, default in (("tts_pad", 151671), ("tts_bos", 151672), ("tts_eos", 151673)):
            setattr(self, f"{name}_token_id", rest.pop(f"{name}_token_id", default))
        super().__init__(**rest)


class Qwen3TTSTokenizerV2Config(PreTrainedConfig):  # type: ignore[misc]
    """config.json in the folder speech_tokenizer."""

    model_type = "qwen3_tts_tokenizer_12hz"

    def __init__(
        self,
        encoder_config: Values | None = None,
        decoder_config: Values | None = None,
        encoder_valid_num_quantizers: int = 16,
        output_sample_rate: int = 24000,
        **rest: Any,
    ) -> None:
        self.encoder_config, self.decoder_config = encoder_config or {}, decoder_config or {}
        self.encoder_valid_num_quantizers, self.output_sample_rate = encoder_valid_num_quantizers, output_sample_rate
        super().__init__(**rest)


_DECODER = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
)


def decoder_config(values: Values) -> Qwen3Config:
    """Of a talker or a code predictor. Its positions have three axes that are always equal where all is text and sound,
    so that they are ordinary ones. Raises ValueError for what no published checkpoint has."""
    scaling = values.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default" or values.get("use_sliding_window"):
        raise ValueError(f"rope_type={kind!r} or a sliding window in a talker is not known")
    given = {name: values[name] for name in _DECODER if name in values}
    heads = values["num_attention_heads"]
    return Qwen3Config(
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        rope_parameters={"rope_type": "default", "rope_theta": float(values.get("rope_theta", 10000))},
        **given,
    )
