"""Small tokenizers that spell out what they do not know, in the classes and with the special tokens of the real ones.

Vocabularies are written out by hand, since the order in which a trainer numbers its tokens changes from run to run.
Few words are known, so that prompt templates are never shorter than with the real vocabulary: pipelines cut a fixed
number of template tokens off.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import transformers as T

Vocabulary = tuple[dict[str, int], list[tuple[str, str]]]  # token ids, merges

CORPUS = (
    "a photo of a cat on a red chair, the quick brown fox jumps over the lazy dog. two people walk along the river at "
    "night while it rains; a large wooden table with a blue cup and some books. she sells sea shells by the sea shore. "
    "music with drums and a slow piano, speech of a calm voice, wind in the trees, low quality, blurry, distorted."
)
_SIGNS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"-()"
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.content is string %}{{ m.content }}{%- else %}{%- for c in m.content %}"
    "{%- if c.type == 'image' or 'image' in c %}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif c.type == 'video' or 'video' in c %}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- elif c.type == 'audio' or 'audio' in c %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{%- elif 'text' in c %}{{ c.text }}{%- endif %}{%- endfor %}{%- endif %}{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
# One that shows tools, and how to call them.
TOOLS_CHATML = (
    "{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}{%- for t in tools %}{{ '\\n' + (t | tojson) }}{%- endfor %}"
    "{{ '\\n</tools><|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for c in m.tool_calls or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) }}'
    "{{ '}\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
QWEN_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
]


@functools.cache
def _bpe(suffix: str = "") -> Vocabulary:
    """Byte-level: knows the words of CORPUS. `suffix` marks the end of a word, in place of a space before it."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    if suffix:
        for c in alphabet:
            vocab[c + suffix] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in sorted(set(re.findall(r"[a-z]+", CORPUS))):
        pieces = [*word[:-1], word[-1] + suffix] if suffix else ["\u0120", *word]  # U+0120 is the byte-level space
        left = pieces[0]
        for right in pieces[1:]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
            left += right
    return vocab, merges


def qwen_tokenizer(
    extra: Sequence[str] = (), chat_template: str | None = CHATML, padding_side: str = "right", **named: str
) -> T.Qwen2Tokenizer:
    """`extra` special tokens get ids after Qwen's own; `named` are those that get an attribute, such as image_token."""
    vocab, merges = _bpe()
    kw: dict[str, Any] = {"model_max_length": 4096, "eos_token": "<|im_end|>", "padding_side": padding_side, **named}
    tok = T.Qwen2Tokenizer(vocab=dict(vocab), merges=list(merges), **kw)
    tok.add_special_tokens({"additional_special_tokens": [*QWEN_SPECIAL, *extra]})
    if chat_template:
        tok.chat_template = chat_template
    return tok


def whisper_tokenizer(languages: Sequence[str], seconds: int) -> T.WhisperTokenizer:
    """With the special tokens of multilingual ones in their order, and a timestamp for every fiftieth of a second."""
    vocab, merges = _bpe()
    ends = {"<|endoftext|>": len(vocab)}
    tok = T.WhisperTokenizer(vocab=dict(vocab) | ends, merges=list(merges))
    tasks = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
    tok.add_special_tokens({"additional_special_tokens": [
        f"<|{name}|>" for name in ("startoftranscript", *languages, *tasks)
    ]})  # fmt: skip
    tok.add_tokens([f"<|{i / 50:.2f}|>" for i in range(seconds * 50 + 1)])
    return tok


def clip_tokenizer(pad: str = "<|endoftext|>") -> T.CLIPTokenizer:
    vocab, merges = _bpe("</w>")
    vocab = dict(vocab)
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocab[special] = len(vocab)
    return T.CLIPTokenizer(vocab=vocab, merges=list(merges), pad_token=pad, model_max_length=77)


def t5_tokenizer() -> T.T5Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    words = sorted(set(re.findall(r"[a-z]+", CORPUS)))
    pieces += [("▁" + w, -4.0 - 0.01 * i) for i, w in enumerate(words)]
    pieces += [(c, -8.0 - 0.01 * i) for i, c in enumerate("abcdefghijklmnopqrstuvwxyz" + _SIGNS)]
    pieces += [(f"<extra_id_{i}>", 0.0) for i in range(99, -1, -1)]
    return T.T5Tokenizer(vocab=pieces, model_max_length=512)


def _sentencepiece_bpe(specials: Sequence[str]) -> Vocabulary:
    vocab = {s: i for i, s in enumerate(specials)}
    for i in range(256):
        vocab.setdefault(f"<0x{i:02X}>", len(vocab))
    for c in sorted(set(CORPUS + _SIGNS + "<>|_\n") - {" "}):
        vocab.setdefault(c, len(vocab))
    vocab.setdefault("▁", len(vocab))
    merges = []
    for c in "abcdefghijklmnopqrstuvwxyz":
        merges.append(("▁", c))
        vocab.setdefault("▁" + c, len(vocab))
    return vocab, merges


GEMMA_CHAT = (
    "{{ bos_token }}{%- for m in messages %}{{ '<start_of_turn>' + m.role + '\\n' }}"
    "{%- if m.content is string %}{{ m.content }}{%- else %}{%- for c in m.content %}"
    "{%- if 'text' in c %}{{ c.text }}{%- endif %}{%- endfor %}{%- endif %}{{ '<end_of_turn>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"
)


def gemma_tokenizer(extra: Sequence[str] = ()) -> T.GemmaTokenizer:
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", *extra]
    vocab, merges = _sentencepiece_bpe(specials)
    tok = T.GemmaTokenizer(vocab=vocab, merges=merges, model_max_length=1024, padding_side="left")
    tok.chat_template = GEMMA_CHAT
    return tok


def llama_tokenizer(specials: Sequence[str] = (), **named: str) -> T.LlamaTokenizer:
    """`named` are those of the special tokens that get an attribute, such as image_token."""
    vocab, merges = _sentencepiece_bpe(["<unk>", "<s>", "</s>", *specials])
    tok = T.LlamaTokenizer(vocab=vocab, merges=merges, model_max_length=2048, **named)
    tok.pad_token = "</s>"
    return tok


def size_of(tok: T.PreTrainedTokenizerBase) -> int:
    """Vocabulary size for a model: a multiple of 8."""
    return -(-len(tok) // 8) * 8


def role_tokens(tok: T.Qwen2Tokenizer) -> T.Qwen2Tokenizer:
    """Roles are single tokens in real Qwen vocabularies; the omni talkers look for them by id."""
    tok.add_tokens(["system", "user", "assistant"])
    return tok
