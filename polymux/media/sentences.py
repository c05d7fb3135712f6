"""Text into pieces that can be spoken one after the other: sentences, and parts of those that are too long.

Nothing of the text is lost: the pieces are the text, but for the white space where they meet. Knows no languages, only
the signs that end sentences and clauses in the scripts of the world.
"""

from __future__ import annotations

import re
import unicodedata

_ENDS = ".!?\u2026\u3002\uff01\uff1f\uff0e\u061f\u06d4\u0964\u0965\u1362\u1367\u104b\u17d4\u0589"  # of sentences
_WIDE_ENDS = "\u3002\uff01\uff1f\uff0e\u0964\u0965"  # after these no white space is needed
_CLOSING = "\"'\u201d\u2019\u00bb)]}\u300d\u300f\uff09"
_SENTENCE = re.compile(rf"[{_ENDS}]+[{re.escape(_CLOSING)}]*(?=\s|$)|[{_WIDE_ENDS}]+[{re.escape(_CLOSING)}]*|\n\s*\n")
_CLAUSE = re.compile(r"[,;:\u3001\uff0c\uff1b\uff1a\u060c\u061b\u2014]\s*")
_SPACE = re.compile(r"\s+")
_SHORT = re.compile(r"(?:^|\s)(?:[A-Z]|Dr|Mr|Mrs|Ms|Prof|St|vs|etc|e\.g|i\.e)\.$")  # an abbreviation, most likely
_WIDE = 4  # a sign that stands for a syllable or a word takes about as long as so many letters
_LOOK_BACK = 200  # signs that the end of a sentence may consist of
_JOINERS = "\u200d\ufe0f"


def length(text: str) -> int:
    """About how long it takes to speak, in letters."""
    return sum(_WIDE if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)


def pieces(text: str, longest: int) -> list[str]:
    """The text's sentences, in parts where their `length` exceeds `longest`. Empty if there is nothing to speak."""
    made: list[str] = []
    for sentence in _sentences(text):
        for part in _parts(sentence, longest):
            if _speakable(part) or not made:
                made.append(part)
            else:  # signs alone belong to what is before them
                made[-1] = f"{made[-1]} {part}"
    if len(made) > 1 and not _speakable(made[0]):
        made[:2] = [f"{made[0]} {made[1]}"]
    return [piece for piece in made if _speakable(piece)]


class SentenceStream:
    """The sentences of a text that comes in parts: each as soon as what follows shows that it has ended.

    Those of the whole text, but that signs alone belong to what comes after them.
    """

    def __init__(self) -> None:
        self._text = ""
        self._looked_at = 0  # no sentence ends before that

    @property
    def waiting(self) -> int:
        """Characters that are not in a sentence yet."""
        return len(self._text)

    def add(self, part: str) -> list[str]:
        self._text += part
        found, start = [], 0
        for match in _SENTENCE.finditer(self._text, max(0, self._looked_at - _LOOK_BACK)):
            end = match.end()
            if end == len(self._text):  # the next part may begin with more of its end
                break
            if not _SHORT.search(self._text, start, end) and _speakable(self._text[start:end]):
                found.append(self._text[start:end].strip())
                start = end
        self._text = self._text[start:]
        self._looked_at = len(self._text)
        return found

    def finish(self) -> list[str]:
        """What is left, if it can be spoken; a new text may begin."""
        rest, self._text, self._looked_at = self._text.strip(), "", 0
        return [rest] if _speakable(rest) else []


def _sentences(text: str) -> list[str]:
    found, start = [], 0
    for match in _SENTENCE.finditer(text):
        if _SHORT.search(text, start, match.end()):
            continue
        found.append(text[start : match.end()].strip())
        start = match.end()
    return [sentence for sentence in [*found, text[start:].strip()] if sentence]


def _parts(text: str, longest: int) -> list[str]:
    """At clauses if that helps, else between words, else between signs."""
    parts: list[str] = []
    while length(text) > longest:
        head = _fitting(text, longest)
        cut = _last(_CLAUSE, head, len(head) // 2) or _last(_SPACE, head, 0) or len(head)
        parts.append(text[:cut].strip())
        text = text[cut:].strip()
    return [part for part in [*parts, text] if part]


def _fitting(text: str, longest: int) -> str:
    """The longest beginning that is not too long, and does not part what is one sign; one sign at least."""
    total, end = 0, 0
    for i, sign in enumerate(text):
        total += length(sign)
        if total > longest and end:
            break
        joined = i + 1 < len(text) and (_joins(text[i + 1]) or sign in _JOINERS)
        end = end if joined else i + 1
    return text[: end or len(text)]


def _joins(sign: str) -> bool:
    return unicodedata.category(sign).startswith("M") or sign in _JOINERS


def _last(pattern: re.Pattern[str], text: str, after: int) -> int | None:
    ends = [match.end() for match in pattern.finditer(text) if match.end() > after]
    return ends[-1] if ends else None


def _speakable(text: str) -> bool:
    return any(unicodedata.category(sign)[0] in "LNS" for sign in text)
