"""What a talker is told before it begins: text and codes, which stand on top of each other, position by position.

First who speaks and in which language; then the text, or, after a recording, what is said there with its codes.
Looks tables up and adds; calls no network but the projection of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from polymux.models.qwen3_tts.configs import Qwen3TTSConfig
from polymux.models.qwen3_tts.talker import Talker

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Script:
    """One text, and who is to speak it, as token ids.

    role: what stands before the text; text: without what stands before and after.
    instructions: tokens of how to speak; none: nothing is said of it.
    speaker: the code that stands for a voice; None: `Heard` has one, or there is none.
    """

    role: Sequence[int]
    text: Sequence[int]
    instructions: Sequence[int] = ()
    speaker: int | None = None
    language: int | None = None


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A voice: its vector (channels), and if it was recorded saying something, that as tokens and codes (groups, n)."""

    vector: Tensor
    words: Sequence[int] = ()
    codes: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """embeds (1, n, channels); trailing (1, m, channels): what is added to the frames, one each; then `after`."""

    embeds: Tensor
    trailing: Tensor
    after: Tensor

    def at(self, frame: int) -> Tensor:
        """What is added to this frame."""
        return self.trailing[:, frame : frame + 1] if frame < self.trailing.shape[1] else self.after


class Prompter:
    """Of one talker."""

    def __init__(self, talker: Talker, config: Qwen3TTSConfig) -> None:
        self._talker, self._config, self._codec = talker, config, config.talker_config
        names = ("tts_bos", "tts_eos", "tts_pad")
        self._begin, self._end, self._pad = (self._words([config.to_dict()[f"{name}_token_id"]]) for name in names)

    def of(self, script: Script, heard: Heard | None) -> Prompt:
        """Without a recording's codes the whole text comes first, unless there is a recorded voice's vector: then, as
        with codes, text and sound go side by side."""
        head = self._head(script, heard)
        if heard is None:
            text = torch.cat([self._words(script.text), self._end], dim=1)
            body = text + self._code("codec_pad_id")
            return self._prompt(script, head, [body, self._pad + self._code("codec_bos_id")], text[:, :0])
        text = torch.cat([self._words([*heard.words, *script.text]), self._end], dim=1)
        codes = self._code("codec_bos_id")
        if heard.codes is not None:
            codes = torch.cat([codes, self._frames(heard.codes)], dim=1)
        count = codes.shape[1]
        beside = torch.cat([text[:, :count], self._pad.expand(-1, max(count - text.shape[1], 0), -1)], dim=1)
        return self._prompt(script, head, [beside + codes], text[:, count:])

    def _prompt(self, script: Script, head: Tensor, body: list[Tensor], trailing: Tensor) -> Prompt:
        before = [self._words(script.instructions)] if script.instructions else []
        embeds = torch.cat([*before, self._words(script.role), head, *body], dim=1)
        return Prompt(embeds=embeds, trailing=trailing, after=self._pad)

    def _head(self, script: Script, heard: Heard | None) -> Tensor:
        """Language and voice, under text that says nothing yet and then that it begins."""
        language = script.language
        begins, ends = self._codec["codec_think_bos_id"], self._codec["codec_think_eos_id"]
        thinks = self._codec["codec_nothink_id" if language is None else "codec_think_id"]
        parts = [self._codes([thinks, begins, *([] if language is None else [language]), ends])]
        if heard is not None:
            parts.append(heard.vector.to(parts[0]).reshape(1, 1, -1))
        elif script.speaker is not None:
            parts.append(self._codes([script.speaker]))
        codes = torch.cat([*parts, self._code("codec_pad_id")], dim=1)
        return torch.cat([self._pad.expand(-1, codes.shape[1] - 1, -1), self._begin], dim=1) + codes

    def _frames(self, codes: Tensor) -> Tensor:
        """What each frame of (groups, n) embeds to."""
        tables = [self._talker.model.codec_embedding, *self._talker.code_predictor.model.codec_embedding]
        return torch.stack([embedding(c, t.weight) for c, t in zip(codes, tables, strict=True)]).sum(0)[None]

    def _words(self, ids: Sequence[int]) -> Tensor:
        table = self._talker.model.text_embedding.weight
        return self._talker.text_projection.project(embedding(torch.tensor([list(ids)], device=table.device), table))

    def _codes(self, ids: Sequence[int]) -> Tensor:
        table = self._talker.model.codec_embedding.weight
        return embedding(torch.tensor([list(ids)], device=table.device), table)

    def _code(self, name: str) -> Tensor:
        return self._codes([self._codec[name]])
