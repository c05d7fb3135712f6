"""A text is split into what can be spoken, and nothing of it is lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymux.media.sentences import SentenceStream, length, pieces


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Hello there. Second sentence.", ["Hello there.", "Second sentence."]),
        ("Dr. Smith paid 3.50 dollars! Really?!", ["Dr. Smith paid 3.50 dollars!", "Really?!"]),
        ('"Yes." he said... And so on', ['"Yes."', "he said...", "And so on"]),
        ("今天天气很好。我们去公园吧！好吗？", ["今天天气很好。", "我们去公园吧！", "好吗？"]),
        ("مرحبا. كيف حالك؟ جيد", ["مرحبا.", "كيف حالك؟", "جيد"]),
        ("यह अच्छा है। चलो।", ["यह अच्छा है।", "चलो।"]),
        ("A title\n\nand a paragraph", ["A title", "and a paragraph"]),
        ("Well ... ... yes", ["Well ... ...", "yes"]),
        ("... first", ["... first"]),
    ],
)
def test_sentences(text: str, wanted: list[str]) -> None:
    assert pieces(text, 1000) == wanted


@pytest.mark.parametrize("text", ["", "   ", "...", "?! -- ,"])
def test_nothing_to_speak(text: str) -> None:
    assert pieces(text, 100) == []


def test_long_ones_are_parted_at_clauses_then_words_then_signs() -> None:
    assert pieces("one two three four, five six seven eight", 25) == ["one two three four,", "five six seven eight"]
    assert pieces("word " * 5, 12) == ["word word", "word word", "word"]
    assert pieces("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]
    assert pieces("あ" * 25, 40) == ["あ" * 10, "あ" * 10, "あ" * 5]  # each takes as long as four letters


def test_what_is_one_sign_stays_together() -> None:
    family = "👩\u200d👩\u200d👧"
    assert pieces(family * 3, 4) == [family] * 3
    assert pieces("e\u0301" * 4, 2) == ["e\u0301"] * 4


@given(st.text(alphabet=st.sampled_from("ab .!?,;\n。、あ\u0301👩\u200d7$-"), max_size=120), st.integers(1, 30))
def test_all_of_the_text_is_there_and_no_piece_is_too_long(text: str, longest: int) -> None:
    made = pieces(text, longest)
    if made:
        assert re.sub(r"\s", "", "".join(made)) == re.sub(r"\s", "", text)
    else:
        assert not re.search(r"[ab7$あ👩]", text)
    for piece in made:
        spoken = re.sub(r"[.!?,;。、\s\u0301\u200d-]", "", piece)  # signs alone go with what is beside them
        assert length(spoken) <= max(longest, 8 if "\u200d" in piece else 4)


def streamed(text: str, size: int) -> list[str]:
    stream = SentenceStream()
    made = [sentence for i in range(0, len(text), size) for sentence in stream.add(text[i : i + size])]
    made += stream.finish()
    assert stream.waiting == 0 and stream.finish() == []
    return made


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    "text",
    [
        "Hello there. Second sentence.", "Dr. Smith paid 3.50 dollars! Really?!", '"Yes." he said... And so on',
        "今天天气很好。我们去公园吧！好吗？", "「好。」他说。", "यह अच्छा है। चलो।",
        "A title\n\nand a paragraph", "", " ", "no end",
    ],
)  # fmt: skip
def test_sentences_of_parts_are_those_of_the_whole(text: str, size: int) -> None:
    assert streamed(text, size) == pieces(text, 10**6)


def test_a_sentence_comes_when_the_next_begins() -> None:
    stream = SentenceStream()
    assert [stream.add(part) for part in ("Hello", ".", ".", " ", "3.", "5 of it", "。", "”", "x")] == [
        [], [], [], ["Hello.."], [], [], [], [], ["3.5 of it。”"]
    ]  # fmt: skip
    assert stream.waiting == 1 and stream.finish() == ["x"]
    assert streamed("... Well ... ... yes. ...", 3) == ["... Well ...", "... yes."]


@given(st.text(alphabet=' .!?a\n。」"Dr,', max_size=60), st.integers(1, 5))
def test_nothing_that_is_spoken_is_lost(text: str, size: int) -> None:
    letters = re.sub(r"[^aDr]", "", text)
    assert re.sub(r"[^aDr]", "", "".join(streamed(text, size))) == letters
    assert streamed(text, size) == streamed(text, 1)
