"""The model: from a script to frames of codes, one call of the talker each, and to their sound.

Knows no tokenizers; whoever calls `frames` or `sound` has each part as soon as it is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from polymux.models.drawing import Drawing
from polymux.models.qwen3_tts.configs import Qwen3TTSConfig, Values
from polymux.models.qwen3_tts.prompt import Heard, Prompt, Prompter, Script
from polymux.models.qwen3_tts.speaker import SpeakerEncoder
from polymux.models.qwen3_tts.talker import Rows, Talker

Tensor = torch.Tensor
Kept = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Start(Prompt):
    """What frames are written from. `rows`: one; `kept`: what the codec goes on from; `most`: first codes, the last of
    which is not heard."""

    rows: Rows
    kept: Kept
    most: int


class Codec(Protocol):
    """What makes sound of codes."""

    def encode(self, samples: Tensor) -> Tensor: ...

    def decode(self, codes: Tensor, kept: Kept = ()) -> tuple[Tensor, Kept]: ...


class Qwen3TTSForConditionalGeneration(PreTrainedModel):  # type: ignore[misc]
    """As published checkpoints name it. Those of type "base" have a network that makes a vector of a voice."""

    config_class = Qwen3TTSConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"

    def __init__(self, config: Qwen3TTSConfig) -> None:
        super().__init__(config)
        self.defaults: Values = {}
        self.talker = Talker(config.talker_config)
        if config.tts_model_type == "base":
            self.speaker_encoder = SpeakerEncoder(config.speaker_encoder_config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, folder: str | Path, *args: Any, **kwargs: Any) -> Any:
        """As of other models; with the checkpoint's own settings of how codes are drawn, which `generate` of
        transformers would not know."""
        made = super().from_pretrained(folder, *args, **kwargs)
        file = Path(folder) / "generation_config.json"
        model = made[0] if isinstance(made, tuple) else made
        model.defaults = json.loads(file.read_text()) if file.is_file() else {}
        return made

    @torch.no_grad()
    def start(self, codec: Codec, script: Values, voice: Values, drawing: Values) -> Start:
        """What is to be known before the first frame.

        script: see `Script`. voice: nothing; or `vector`; or `recording` (samples) and `words`, see `Heard`.
        drawing: `first` and `others` as `generate` knows such settings, and `most`. The key of the noise comes from the
        default generator of the CPU.
        """
        heard, kept = self._heard(codec, voice)
        prompt = Prompter(self.talker, self.config).of(Script(**script), heard)
        how = torch.tensor([[Drawing.of(drawing[name]).row() for name in ("first", "others")]])
        rows = self.talker.row(torch.randint(2**62, (1,)), how)
        return Start(**vars(prompt), rows=rows, kept=kept, most=drawing["most"])

    def frames(self, start: Start) -> Iterator[Tensor]:
        """Codes (groups) on the host, until the end or as many as there may be."""
        talker, cache = self.talker, DynamicCache()
        codes, rows = talker(start.embeds, 0, cache, start.rows)
        for number in range(start.most - 1):
            if int(codes[0, -1]) == talker.end:
                return
            codes, rows = talker(start.at(number), start.embeds.shape[1] + number, cache, rows)
            yield codes[0, :-1]

    def sound(self, codec: Codec, start: Start, chunk: int) -> Iterator[Tensor]:
        """Samples (samples), of so many frames at a time."""
        kept, waiting = start.kept, list[Tensor]()
        for frame in self.frames(start):
            waiting.append(frame)
            if len(waiting) == chunk:
                samples, kept = codec.decode(torch.stack(waiting, dim=1)[None], kept)
                waiting = []
                yield samples[0, 0]
        if waiting:
            samples, _ = codec.decode(torch.stack(waiting, dim=1)[None], kept)
            yield samples[0, 0]

    def _heard(self, codec: Codec, voice: Values) -> tuple[Heard | None, Kept]:
        """The voice, and what the codec keeps of it: the sound goes on from the recording's."""
        if "recording" in voice:
            samples = torch.from_numpy(voice["recording"]).to(self.device)
            codes = codec.encode(samples)
            _, kept = codec.decode(codes[None])
            vector = self.speaker_encoder.vector(samples)
            return Heard(vector=vector, words=voice["words"], codes=codes), kept
        if "vector" in voice:
            return Heard(vector=torch.tensor(voice["vector"], device=self.device)), ()
        return None, ()

    def ones(self, count: int) -> Tensor:
        """(1, count)"""
        return torch.ones(1, count, dtype=torch.long)
