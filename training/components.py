"""The parts of the demo model before training: sizes, vocabulary, scheduler; the classes are those of the libraries.

The vocabulary holds whole words of the captions and of the pipeline's own prompt template, spelt out in bytes for
anything else; the template is exactly the number of tokens that `QwenImagePipeline` cuts off. Words are listed by hand
and by `captions.py`, never learnt, so token ids do not change from run to run.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers as D
import torch
import transformers as T

from training import captions, scenes

TEMPLATE_TOKENS = 34
TAIL_TOKENS = 5  # <|im_end|> newline <|im_start|> assistant newline
SHIFT = 2.0
"""The scheduler's static shift, and the shift of the noise levels that training sees."""

_ALWAYS = (
    "a an the of on in at to and is there that fades from with near background picture image drawing photo gradient"
)
_TEMPLATE_FIRST = ("system", "user", "assistant", "Describe")
_TEMPLATE_REST = "the image by detailing the color shape size texture quantity text spatial relationships of objects"
_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_SPACE = "\u0120"  # a space in byte-level vocabularies
_CHAT = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Sizes:
    """Widths and depths. The defaults are the shipped model's; tests shrink them."""

    layers: int = 6
    heads: int = 5
    head_dim: int = 32
    text_width: int = 160
    text_layers: int = 3
    text_heads: int = 5
    text_mlp: int = 384
    vae_base: int = 16
    vae_mult: tuple[int, ...] = (1, 2, 3, 3)
    channels: int = 12

    @classmethod
    def from_json(cls, text: str) -> Sizes:
        values = json.loads(text)
        return cls(**{**values, "vae_mult": tuple(values["vae_mult"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def _caption_words() -> list[str]:
    """Every word that a caption may hold, in a fixed order."""
    tables: tuple[Mapping[Any, tuple[str, ...]], ...] = (
        captions.SIZE_WORDS,
        captions.TEXTURE_WORDS,
        captions.COLOUR_WORDS,
        captions.SHAPE_WORDS,
        captions.RELATION_WORDS,
        captions.EDGE_WORDS,
        captions.NUMBER_WORDS,
    )
    texts = [_ALWAYS, _TEMPLATE_REST, *captions.OPENINGS, *captions.CENTER_WORDS, *scenes.COLOURS, *scenes.BACKGROUNDS]
    texts += [word for table in tables for words in table.values() for word in words]
    texts += [
        "corner upper lower top bottom left right letter letters against crosses rhombuses pluses center middle",
        "one",
    ]
    texts += scenes.PLAIN_SHAPES
    words = [w for text in texts for w in re.findall(r"[a-z]+", text)]
    plurals = [f"{w}s" for w in [*scenes.PLAIN_SHAPES, "disc"] if w != "cross"]
    return list(dict.fromkeys([*words, *plurals]))


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Bytes, then words with a space before them, then words that may begin a prompt.

    Merges grow a word letter by letter from its first byte. Those that start with a space come first and hence never
    see the letters joined in another way; the rest is joined letter by letter too, the longest known start winning.
    """
    from tokenizers import pre_tokenizers

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []

    def add(pieces: list[str]) -> None:
        left = pieces[0]
        for right in pieces[1:]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
            left += right

    words = _caption_words()
    for word in [*words, *scenes.LETTERS]:
        add([_SPACE, *word])
    for word in [*_TEMPLATE_FIRST, *words, *(w.capitalize() for w in words)]:
        _add_whole(word, vocab, merges)
    return vocab, merges


def _encode_word(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """What the merges make of a word: the pair of the lowest rank is joined first."""
    pieces = list(word)
    while True:
        pairs = [(ranks[p], i) for i, p in enumerate(itertools.pairwise(pieces)) if p in ranks]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def _add_whole(word: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Make the word one token by joining what the merges so far leave of it, which changes no other word's pieces."""
    pieces = _encode_word(word, {pair: rank for rank, pair in enumerate(merges)})
    while len(pieces) > 1:
        joined = pieces[0] + pieces[1]
        vocab.setdefault(joined, len(vocab))
        merges.append((pieces[0], pieces[1]))
        pieces = [joined, *pieces[2:]]


def tokenizer() -> T.Qwen2Tokenizer:
    vocab, merges = _vocabulary()
    tok = T.Qwen2Tokenizer(
        vocab=vocab, merges=merges, model_max_length=1024, eos_token="<|im_end|>", padding_side="right"
    )
    tok.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    tok.chat_template = _CHAT
    return tok


def text_encoder(tok: T.Qwen2Tokenizer, sizes: Sizes) -> T.Qwen2_5_VLForConditionalGeneration:
    """Its vision tower exists because the class demands one, as small as it can be; nothing ever runs it."""
    ids = tok.convert_tokens_to_ids
    half = sizes.text_width // sizes.text_heads // 2
    config = T.Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=-(-len(tok) // 8) * 8,
            hidden_size=sizes.text_width,
            intermediate_size=sizes.text_mlp,
            num_hidden_layers=sizes.text_layers,
            num_attention_heads=sizes.text_heads,
            num_key_value_heads=1,
            max_position_embeddings=1100,
            rope_parameters={
                "rope_type": "default",
                "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
                "rope_theta": 10000.0,
            },
            bos_token_id=0,
            eos_token_id=ids("<|im_end|>"),
            pad_token_id=ids("<|endoftext|>"),
            tie_word_embeddings=True,
        ),
        vision_config=dict(
            depth=1,
            hidden_size=8,
            intermediate_size=16,
            num_heads=2,
            out_hidden_size=sizes.text_width,
            patch_size=14,
            spatial_merge_size=2,
            temporal_patch_size=2,
            window_size=112,
            fullatt_block_indexes=[0],
        ),
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    return T.Qwen2_5_VLForConditionalGeneration(config)


def vae(sizes: Sizes) -> D.AutoencoderKLQwenImage:
    """A video autoencoder of which still pictures use one frame; kernels of the other frames are zero."""
    model = D.AutoencoderKLQwenImage(
        base_dim=sizes.vae_base,
        z_dim=sizes.channels,
        dim_mult=list(sizes.vae_mult),
        num_res_blocks=1,
        latents_mean=[0.0] * sizes.channels,
        latents_std=[1.0] * sizes.channels,
    )
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Conv3d):
                module.weight[:, :, : module.kernel_size[0] - 1] = 0
                if "time_conv" in name:
                    module.weight.zero_()
    return model


def transformer(sizes: Sizes) -> D.QwenImageTransformer2DModel:
    """Starts as the identity: gates and the output layer are zero, as is usual for diffusion transformers."""
    side = (sizes.head_dim - 4) // 2
    model = D.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * sizes.channels,
        out_channels=sizes.channels,
        num_layers=sizes.layers,
        attention_head_dim=sizes.head_dim,
        num_attention_heads=sizes.heads,
        joint_attention_dim=sizes.text_width,
        axes_dims_rope=(4, side, side),
    )
    for block in model.transformer_blocks:
        for modulation in (block.img_mod, block.txt_mod):
            torch.nn.init.zeros_(modulation[1].weight)
            torch.nn.init.zeros_(modulation[1].bias)
    for layer in (model.norm_out.linear, model.proj_out):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return model


def scheduler() -> D.FlowMatchEulerDiscreteScheduler:
    return D.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT, use_dynamic_shifting=False)


def pipeline(sizes: Sizes, seed: int) -> D.QwenImagePipeline:
    """The whole pipeline with fresh weights, in fp32 on the CPU."""
    torch.manual_seed(seed)
    tok = tokenizer()
    return D.QwenImagePipeline(
        scheduler=scheduler(),
        vae=vae(sizes),
        text_encoder=text_encoder(tok, sizes),
        tokenizer=tok,
        transformer=transformer(sizes),
    )


def size_in_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
