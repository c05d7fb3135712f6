"""Language models that read prompts, whatever denoiser comes behind: how their layers are divided among ranks."""

from polymux.families.sharding import Cut, Sharding, TensorPlan

_T5_LAYER = "encoder.block.*.layer"

_T5 = TensorPlan(
    cuts=(
        *(Cut(layer=f"{_T5_LAYER}.0.SelfAttention.{name}", by="column") for name in ("q", "k", "v")),
        Cut(layer=f"{_T5_LAYER}.0.SelfAttention.o", by="row"),
        Cut(layer=f"{_T5_LAYER}.0.SelfAttention.relative_attention_bias", by="result"),
        *(Cut(layer=f"{_T5_LAYER}.1.DenseReluDense.{name}", by="column") for name in ("wi", "wi_0", "wi_1")),
        Cut(layer=f"{_T5_LAYER}.1.DenseReluDense.wo", by="row"),
    ),
    heads=(f"{_T5_LAYER}.0.SelfAttention.n_heads", f"{_T5_LAYER}.0.SelfAttention.inner_dim"),
    counts=("num_heads",),
)

_CLIP = TensorPlan(
    cuts=tuple(
        Cut(layer=f"{layers}.*.{name}", by="row" if name in ("self_attn.out_proj", "mlp.fc2") else "column")
        for layers in ("encoder.layers", "text_model.encoder.layers")  # older transformers have all in text_model
        for name in (*(f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2")
    ),
)

_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def _decoder(layers: str) -> TensorPlan:
    """Models that only look back, which have taken the same names for their layers. What sees pictures stays whole."""
    return TensorPlan(
        cuts=(
            *(Cut(layer=f"{layers}.*.{name}", by="column") for name in _COLUMNS),
            *(Cut(layer=f"{layers}.*.{name}", by="row") for name in _ROWS),
        ),
        counts=("num_attention_heads", "num_key_value_heads"),
    )


SHARDING = (
    Sharding(models=("T5EncoderModel", "UMT5EncoderModel"), tensor=_T5),
    Sharding(models=("CLIPTextModel", "CLIPTextModelWithProjection"), tensor=_CLIP),
    Sharding(models=("LlamaModel", "Qwen3Model", "Gemma2Model"), tensor=_decoder("layers")),
    Sharding(models=("Qwen3ForCausalLM",), tensor=_decoder("model.layers")),
    Sharding(
        models=("Qwen2_5_VLForConditionalGeneration", "Gemma3ForConditionalGeneration"),
        tensor=_decoder("model.language_model.layers"),
    ),
)
