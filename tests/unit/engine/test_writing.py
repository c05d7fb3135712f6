"""Text as it is written: whole characters, up to where it is to stop; and what is held against repetition."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from polymux.engine.writing import Penalties, Writer

TEXT = "a photo of 你好 नमस्ते, x = f(1)\n\n🇩🇪🎉 naïve"


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Callable[..., Path]) -> Any:
    return T.AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3-lm"))


def write(writer: Writer, ids: list[int]) -> tuple[list[str], int]:
    """The pieces, and how many tokens were taken before it said that it is enough."""
    pieces = []
    for count in range(1, len(ids) + 1):
        enough = bool(writer(torch.tensor([ids[:count]]), None))
        pieces.append(writer.take())
        if enough:
            return pieces, count
    for _ in range(2):  # once is enough, and twice does no harm
        writer.end()
    return [*pieces, writer.take()], len(ids)


def test_pieces_are_whole_characters_and_together_the_text(tokenizer: Any) -> None:
    ids = tokenizer(TEXT).input_ids
    writer = Writer(tokenizer)
    pieces, count = write(writer, ids)
    assert "".join(pieces) == writer.text == TEXT and writer.tokens == ids and count == len(ids)
    assert not any("\ufffd" in piece for piece in pieces) and pieces.count("") < len(pieces)
    assert pieces[0] == "a"  # at once, not at the next space


def test_any_tokens_at_all_make_the_text_that_the_tokenizer_makes_of_them(tokenizer: Any) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        ids = [draw.randrange(len(tokenizer)) for _ in range(30)]
        pieces, _ = write(Writer(tokenizer), ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_where_bytes_are_tokens_those_that_make_no_character_spoil_nothing() -> None:
    bytes_ = {f"<0x{value:02X}>": value for value in range(256)}
    backend = Tokenizer(BPE({**bytes_, "a": 256, " b": 257, "\u2581": 258}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = T.PreTrainedTokenizerFast(tokenizer_object=backend)
    for ids, text in (
        ([0x0A, 0xA8, 256, 257, 258, 256], "\n\ufffda b a"),  # a line's end is told, then a byte that stands alone
        ([256, 0x0A, *"é🙂".encode(), 0xE6, 0x97, 257, *"ß".encode()], "a\né🙂\ufffd\ufffd bß"),
    ):
        pieces, count = write(Writer(tokenizer), ids)
        assert count == len(ids) and "".join(pieces).replace("\ufffd\ufffd", "\ufffd") == text.replace(
            "\ufffd\ufffd", "\ufffd"
        )
    for seed in range(60):
        draw = random.Random(seed)
        few = [draw.randrange(259) for _ in range(4)]
        pieces, count = write(Writer(tokenizer), [draw.choice(few) for _ in range(30)])
        assert count == 30


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (("x = ",), "a photo of 你好 नमस्ते, "), (("好 न",), "a photo of 你"), (("zz", "photo"), "a "), (("a",), ""),
        (("f(1)\n\nno",), TEXT), (("ïve",), TEXT.removesuffix("ïve")), (("🎉", "🇩🇪"), TEXT.partition("🇩🇪")[0]),
    ],
)  # fmt: skip
def test_it_ends_before_a_text_to_stop_at(tokenizer: Any, stops: tuple[str, ...], text: str) -> None:
    ids = tokenizer(TEXT).input_ids
    writer = Writer(tokenizer, stops)
    pieces, count = write(writer, ids)
    assert "".join(pieces) == writer.text == text
    assert writer.stopped == (text != TEXT) and len(writer.tokens) == count
    assert all(text.startswith("".join(pieces[:i])) for i in range(len(pieces)))  # nothing was told too early


def test_penalties_are_of_the_answer_alone() -> None:
    penalties = Penalties(0.5, 2.0)
    scores = torch.zeros(1, 5)
    assert torch.equal(penalties(torch.tensor([[1, 1, 2]]), scores), scores)  # the prompt
    punished = penalties(torch.tensor([[1, 1, 2, 3, 4, 3]]), scores)
    assert punished.tolist() == [[0.0, 0.0, 0.0, -3.0, -2.5]] and torch.equal(scores, torch.zeros(1, 5))
