"""The talker: a decoder that writes the first code of each frame, and a small one that writes the frame's other codes.

A call is a prompt, or one frame; calls of several requests, each with its own place, position, noise and settings, are
rows of one. Knows neither texts nor how a prompt is put together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding
from transformers.activations import ACT2FN

from polymux.models.qwen3_tts.configs import Values, decoder_config
from polymux.models.qwen3_tts.drawing import BARRED, draw, penalised
from polymux.models.qwen3_tts.graphs import Graphs, Rows, power_of_two
from polymux.models.qwen3_tts.layers import Layers
from polymux.models.qwen3_tts.places import FEWEST, Places, Prompts, Short, Steps

Tensor = torch.Tensor
SPECIAL = 1024  # codes at the end of the vocabulary that are no sound


@dataclass(frozen=True)
class Where:
    """Where the rows of a step are: their places and positions, how many positions it looks at, and whether the places
    are all from the first one on."""

    places: Tensor
    positions: Tensor
    length: int
    dense: bool


class TextProjection(torch.nn.Module):
    """From the text's channels to the talker's. Not a `forward`: it runs where it is called."""

    def __init__(self, text: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = torch.nn.Linear(text, text), torch.nn.Linear(text, hidden)
        self._activation = ACT2FN[activation]

    def project(self, x: Tensor) -> Tensor:
        one, two = self.linear_fc1, self.linear_fc2
        inner = self._activation(torch.nn.functional.linear(x, one.weight, one.bias))
        return torch.nn.functional.linear(inner, two.weight, two.bias)


class Decoder(Layers):
    """The talker's layers, and its tables of codes and of text tokens."""

    def __init__(self, values: Values) -> None:
        super().__init__(decoder_config(values))
        self.codec_embedding = torch.nn.Embedding(values["vocab_size"], values["hidden_size"])
        self.text_embedding = torch.nn.Embedding(values["text_vocab_size"], values["text_hidden_size"])


class PredictorLayers(Layers):
    """The code predictor's layers, and a table for each code but the last one."""

    def __init__(self, values: Values, groups: int, talker_hidden: int) -> None:
        super().__init__(decoder_config(values))
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
        same = hidden == talker_hidden
        self.small_to_mtp_projection = torch.nn.Identity() if same else torch.nn.Linear(talker_hidden, hidden)

    def write(self, hidden: Tensor, first: Tensor, noise: Tensor, how: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (rows, groups - 1), and the sum of what all codes of the frame embed to. `hidden`, `first` (rows, 1,
        channels): the talker's state, and what the first code embeds to. `noise` (rows, groups - 1, codes)."""
        config, rows = self.model.config, len(hidden)
        shape = (rows, config.num_key_value_heads, len(self.lm_head) + 1, config.head_dim)
        cache = Short(config.num_hidden_layers, shape, hidden)
        new, total, codes = torch.cat([hidden, first], dim=1), first, []
        for number, head in enumerate(self.lm_head):
            inputs = self.small_to_mtp_projection(new)
            positions = torch.arange(cache.length, cache.length + inputs.shape[1], device=hidden.device)[None]
            made = self.model.through(inputs, positions, cache)
            cache.length += inputs.shape[1]
            code = draw(head(made[:, -1]), noise[:, number], how)
            codes.append(code)
            new = embedding(code[:, None], self.model.table(number))
            total = total + new
        return torch.stack(codes, dim=1), total


class Talker(torch.nn.Module):
    """See `forward`. `places` holds what it remembers of every sentence under way."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        hidden, self.groups = values["hidden_size"], int(values["num_code_groups"])
        self.end, self.codes = int(values["codec_eos_token_id"]), int(values["vocab_size"])
        self.model = Decoder(values)
        self.text_projection = TextProjection(values["text_hidden_size"], hidden, values["hidden_act"])
        self.codec_head = torch.nn.Linear(hidden, self.codes, bias=False)
        self.code_predictor = CodePredictor(values["code_predictor_config"], self.groups, hidden)
        config = self.model.config
        self.graphs = Graphs(self.parameters)
        self.places = Places(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)

    def forward(
        self,
        embeds: Tensor,
        at: Tensor,
        seen: Tensor,
        noise: Tensor,
        how: Tensor,
        before: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A prompt, or one frame of each row.

        embeds (rows, n, channels): the prompt; or what is added to the frame's codes before the next one (n is 1).
        at (rows, 2), on the host: the place where keys and values are kept, and the first position of this call.
        seen (rows, codes): first codes that were drawn before.
        noise (rows, groups, codes): of the first code that this call draws, and of the frame's others.
        how (rows, 2, columns): settings of the first code, and of the others, see `drawing`.
        before: of a frame, the state (rows, 1, channels), and on the host the code (rows, 1), that the last call gave.

        Gives on the host the codes of the frame (rows, groups; of a prompt: rows, 0) with the first code of the next
        one behind them, the state, and what is seen now.
        """
        self.places.ensure(int(at[:, 0].max()), int(at[:, 1].max()) + embeds.shape[1], embeds)
        places, positions = at.to(embeds.device).unbind(1)
        if before is None:
            each = torch.arange(embeds.shape[1], device=embeds.device)[None]
            state = self.model.through(embeds, each, Prompts(self.places, places))[:, -1:]
            drawn, seen = self._first(state, seen, noise, how)
            return drawn.cpu(), state, seen
        hidden, code = before
        inputs = (embeds, seen, noise, how, hidden, code.to(embeds.device))
        codes, state, seen = self._frame(at, places, positions, inputs)
        return codes.cpu(), state, seen

    def _frame(self, at: Tensor, places: Tensor, positions: Tensor, inputs: Rows) -> Rows:
        """One frame of each row, by a graph if there can be one."""
        length = max(power_of_two(int(at[:, 1].max()) + 1), FEWEST[1])
        if not self.fixed:
            return self.step(Where(places, positions, length, dense=False), *inputs)
        rows = power_of_two(int(at[:, 0].max()) + 1)
        every = torch.arange(rows, device=places.device)

        def step(positions: Tensor, *inputs: Tensor) -> Rows:
            return self.step(Where(every, positions, length, dense=True), *inputs)

        frame = self.graphs.frame(step, self.places, rows, length, inputs)
        if frame is None:
            return self.step(Where(places, positions, length, dense=False), *inputs)
        return frame.run(places, positions, inputs)

    @property
    def fixed(self) -> bool:
        """Whether frames are recorded."""
        return self.codec_head.weight.is_cuda

    def step(self, where: Where, *inputs: Tensor) -> Rows:
        """One frame, all on the device. `inputs`: as those of `forward`: embeds, seen, noise, how, state, code."""
        text, seen, noise, how, hidden, code = inputs
        first = embedding(code, self.model.codec_embedding.weight)
        others, total = self.code_predictor.write(hidden, first, noise[:, 1:], how[:, 1])
        columns = torch.arange(where.length, device=code.device)
        mask = (columns <= where.positions[:, None])[:, None, None]
        cache = Steps(self.places, where.places, where.positions, where.length, where.dense)
        state = self.model.through(total + text, where.positions[:, None], cache, mask)
        drawn, seen = self._first(state, seen, noise, how)
        return torch.cat([code, others, drawn], dim=1), state, seen

    def _first(self, state: Tensor, seen: Tensor, noise: Tensor, how: Tensor) -> tuple[Tensor, Tensor]:
        """The first code of the next frame (rows, 1), which is a sound or the end."""
        logits = penalised(self.codec_head(state[:, 0]), seen, how[:, 0])
        number = torch.arange(self.codes, device=logits.device)
        ends = number == self.end
        barred = ((number >= self.codes - SPECIAL) & ~ends) | (ends & (how[:, 0, BARRED, None] > 0))
        code = draw(logits.masked_fill(barred, -torch.inf), noise[:, 0], how[:, 0])[:, None]
        return code, seen.scatter(1, code, True)
