"""The talker: a decoder that writes the first code of each frame, and a small one that writes the frame's other codes.

All of it is for many requests at once, each a row with noise and settings of its own; a row's codes do not depend on
the others. Knows neither texts nor how a prompt is put together, nor where its keys and values are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import embedding, linear
from transformers.activations import ACT2FN

from polymux.models.drawing import COLUMNS, draw, penalised
from polymux.models.layer_caches import FEW, LayerCache, one_by_one
from polymux.models.qwen3_tts.configs import Values, decoder_config
from polymux.models.qwen3_tts.layers import Layers

Tensor = torch.Tensor
SPECIAL = 1024  # codes at the end of the vocabulary that are no sound
FEWEST = 2  # first codes before the end may be drawn


class Rows(NamedTuple):
    """What is known of each row: `key` (rows) of its noise; `how` (rows, 2, columns), settings of the first code and of
    the others, see `drawing`; `seen` (rows, codes), first codes that were drawn before; `frame` (rows), how many calls
    it has had, its prompt and its frames. Of a frame, `state` (rows, 1, channels) and `code` (rows), which the last
    call gave."""

    key: Tensor
    how: Tensor
    seen: Tensor
    frame: Tensor
    state: Tensor
    code: Tensor


class TextProjection(torch.nn.Module):
    """From the text's channels to the talker's. Not a `forward`: it runs where it is called."""

    def __init__(self, text: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = torch.nn.Linear(text, text), torch.nn.Linear(text, hidden)
        self._activation = ACT2FN[activation]

    def project(self, x: Tensor) -> Tensor:
        one, two = self.linear_fc1, self.linear_fc2
        inner = self._activation(linear(x, one.weight, one.bias))
        return linear(inner, two.weight, two.bias)


class Decoder(Layers):
    """The talker's layers, and its tables of codes and of text tokens."""

    def __init__(self, values: Values) -> None:
        super().__init__(decoder_config(values), "sdpa")
        self.codec_embedding = torch.nn.Embedding(values["vocab_size"], values["hidden_size"])
        self.text_embedding = torch.nn.Embedding(values["text_vocab_size"], values["text_hidden_size"])


class PredictorLayers(Layers):
    """The code predictor's layers, and a table for each code but the last one."""

    def __init__(self, values: Values, groups: int, talker_hidden: int) -> None:
        super().__init__(decoder_config(values), FEW, numbered=False)
        tables = [torch.nn.Embedding(values["vocab_size"], talker_hidden) for _ in range(groups - 1)]
        self.codec_embedding = torch.nn.ModuleList(tables)

    def table(self, number: int) -> Tensor:
        """What the code of this number embeds to."""
        return self.codec_embedding[number].get_parameter("weight")


class CodePredictor(torch.nn.Module):
    """Writes the other codes of a frame, one after the other."""

    def __init__(self, values: Values, groups: int, talker_hidden: int) -> None:
        super().__init__()
        self.model = PredictorLayers(values, groups, talker_hidden)
        hidden = values["hidden_size"]
        heads = [torch.nn.Linear(hidden, values["vocab_size"], bias=False) for _ in range(groups - 1)]
        self.lm_head = torch.nn.ModuleList(heads)
        self.choose = _other
        same = hidden == talker_hidden
        self.small_to_mtp_projection = torch.nn.Identity() if same else torch.nn.Linear(talker_hidden, hidden)

    def write(self, rows: Rows, first: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (rows, groups - 1), and the sum of what all codes of the frame embed to. `first` (rows, 1, channels):
        what the first code embeds to."""
        frame = one_by_one(self.model, len(first), len(self.lm_head) + 1, rows.state)
        frame(self.small_to_mtp_projection(rows.state), 0)
        number, how = (rows.frame - 1) * (len(self.lm_head) + 1), rows.how[:, 1]
        new, total, codes = first, first, []
        for i, head in enumerate(self.lm_head):
            made = frame(self.small_to_mtp_projection(new), i + 1)
            code = self.choose(made, self.model.norm, head.get_parameter("weight"), rows.key, number + i + 1, how)
            codes.append(code)
            new = embedding(code[:, None], self.model.table(i))
            total = total + new
        return torch.stack(codes, dim=1), total


class Fuses(Protocol):
    """Has functions run as few kernels."""

    def function(self, given: Callable[..., Tensor]) -> Callable[..., Tensor]: ...


class Talker(torch.nn.Module):
    """See `forward`. Implements `ar.frames.FrameWriter`, too."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        hidden, self.groups = values["hidden_size"], int(values["num_code_groups"])
        self.end, self.codes = int(values["codec_eos_token_id"]), int(values["vocab_size"])
        self.model = Decoder(values)
        self.text_projection = TextProjection(values["text_hidden_size"], hidden, values["hidden_act"])
        self.codec_head = torch.nn.Linear(hidden, self.codes, bias=False)
        self.code_predictor = CodePredictor(values["code_predictor_config"], self.groups, hidden)
        self._choose = _first

    @property
    def backbone(self) -> torch.nn.Module:
        return self.model

    @property
    def decoders(self) -> tuple[torch.nn.Module, ...]:
        return (self.model, self.code_predictor.model)

    def fuse(self, fuses: Fuses) -> None:
        """Have what is drawn from layers run as few kernels."""
        self._choose = fuses.function(_first)
        self.code_predictor.choose = fuses.function(_other)

    def empty(self, rows: int) -> Rows:
        """As many as there may be, which know nothing yet."""
        like = self.codec_head.weight
        numbers = torch.zeros(rows, dtype=torch.long, device=like.device)
        how = torch.ones(rows, 2, COLUMNS, device=like.device)
        seen = torch.zeros(rows, self.codes, dtype=torch.bool, device=like.device)
        state = like.new_zeros(rows, 1, like.shape[1])
        return Rows(numbers, how, seen, numbers.clone(), state, numbers.clone())

    def row(self, key: Tensor, how: Tensor) -> Rows:
        """One that begins: `key` (1), `how` (1, 2, columns)."""
        like = self.codec_head.weight
        return self.empty(1)._replace(key=key.to(like.device), how=how.to(like.device))

    def forward(self, embeds: Tensor, position: int, cache: LayerCache, rows: Rows) -> tuple[Tensor, Rows]:
        """A prompt, at position 0, or one frame.

        embeds (rows, n, channels): the prompt; or what is added to the frame's codes before the next one (n is 1).

        Gives the codes of the frame (rows, groups; of a prompt: rows, 0) with the first code of the next one behind
        them, on the host, and the rows as they are now.
        """
        codes = rows.key[:, None][:, :0]
        if position:
            codes, total = self.frame(rows)
            embeds = embeds + total
        positions = torch.arange(position, position + embeds.shape[1], device=embeds.device)[None]
        now = self.first(self.through(embeds, positions, cache=cache, attention_mask=None)[:, -1:], rows)
        return torch.cat([codes, now.code[:, None]], dim=1).cpu(), now

    def through(self, embeds: Tensor, positions: Tensor, cache: LayerCache | None = None, **attention: Any) -> Tensor:
        """The large decoder."""
        return self.model.through(embeds, positions, cache, **attention)

    def frame(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Codes of a frame (rows, groups), and what they embed to (rows, 1, channels)."""
        first = embedding(rows.code[:, None], self.model.codec_embedding.weight)
        others, total = self.code_predictor.write(rows, first)
        return torch.cat([rows.code[:, None], others], dim=1), total

    def verdict(self, codes: list[int]) -> tuple[bool, bool]:
        """Every frame is a sound; the end is a first code."""
        return True, codes[-1] == self.end

    def first(self, state: Tensor, rows: Rows) -> Rows:
        """Draws the first code of the next frame, which is a sound or the end, from a state (rows, 1, channels)."""
        code = self._choose(self.codec_head(state[:, 0]), rows, rows.frame * self.groups, self.end)
        seen = rows.seen.scatter(1, code[:, None], True)
        return Rows(rows.key, rows.how, seen, rows.frame + 1, state, code)


def _first(logits: Tensor, rows: Rows, number: Tensor, end: int) -> Tensor:
    """Of logits (rows, codes), the last of which are no sounds; one of these is the end, which may come later only."""
    how = rows.how[:, 0]
    codes = torch.arange(logits.shape[1], device=logits.device)
    barred = ((codes >= len(codes) - SPECIAL) & (codes != end)) | ((codes == end) & (rows.frame < FEWEST)[:, None])
    return draw(penalised(logits, rows.seen, how).masked_fill(barred, -torch.inf), rows.key, number, how)


def _other(hidden: Tensor, norm: torch.nn.Module, head: Tensor, key: Tensor, number: Tensor, how: Tensor) -> Tensor:
    """Of what the last layer gives (rows, channels)."""
    return draw(linear(norm(hidden), head), key, number, how)
