"""The model of transformers, and how it begins a sentence whose frames are written together with others'.

Knows no tokenizers, and nothing of who writes the frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from polymux.models import mimi
from polymux.models.csm.writer import Rows, Writer, empty_rows
from polymux.models.drawing import Drawing

Tensor = torch.Tensor
DEPTH = "depth_decoder_"  # before the names of settings for the codes of a frame but the first
# What transformers takes where neither a request nor the checkpoint says anything.
_USUAL = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
# Settings of `generate` that change what is drawn, and that nobody acts on here; what they are where they do not act.
_OTHERS: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "repetition_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "bad_words_ids": (None,),
    "sequence_bias": (None,),
    "num_beams": (None, 1),
}


@dataclass(frozen=True, kw_only=True)
class Start:
    """As `engine.sentence.SpokenStart`. Nothing is added to the frames; `most`: frames, and one more."""

    embeds: Tensor
    trailing: Tensor
    after: Tensor
    rows: Rows
    most: int
    kept: tuple[Tensor, ...] = ()


class CsmForConditionalGeneration(transformers.CsmForConditionalGeneration):  # type: ignore[misc]
    """As published checkpoints name it."""

    @torch.no_grad()
    def start(self, given: Mapping[str, Any]) -> Start:
        """What is to be known before the first frame, of the arguments that `generate` takes. The key of the noise
        comes from the default generator of the CPU."""
        embeds = self._embedded(given)
        first = _drawing(self.generation_config, given, "")
        others = _drawing(self.depth_decoder.generation_config, given, DEPTH)
        how = torch.tensor([[first.row(), others.row()]], device=embeds.device)
        key = torch.randint(2**62, (1,)).to(embeds.device)
        rows = empty_rows(1, embeds)._replace(key=key, how=how)
        nothing = torch.zeros_like(embeds[:, :1])
        return Start(embeds=embeds, trailing=nothing[:, :0], after=nothing, rows=rows, most=given["max_new_tokens"] + 1)

    def writer(self) -> Writer:
        return Writer(self)

    def codec(self) -> mimi.MimiParts:
        return mimi.MimiParts(self.codec_model)

    def alone(self) -> str | None:
        """Why its sentences cannot be written together, if they cannot."""
        for name, settings in (("", self.generation_config), (DEPTH, self.depth_decoder.generation_config)):
            for setting, idle in _OTHERS.items():
                if (value := getattr(settings, setting, None)) not in idle:
                    return f"its generation_config says {name}{setting}={value!r}"
        if self.depth_decoder.generation_config.eos_token_id is not None:
            return f"its generation_config says {DEPTH}eos_token_id"
        return mimi.refusal(self.codec_model.config)

    def _embedded(self, given: Mapping[str, Any]) -> Tensor:
        """The text; and in the places of a recording its codes, and their end."""
        ids, table = given["input_ids"], self.backbone_model.embed_tokens
        embeds: Tensor = self.embed_text_tokens(ids)
        if "input_values" in given:
            codes = self.codec_model.encode(given["input_values"]).audio_codes.transpose(1, 2)
            places = ids == self.config.audio_token_id
            embeds[places] = table(codes)[0, : int(places.sum())]
            ends = torch.full_like(codes[:, :1], self.config.codebook_eos_token_id)
            embeds[ids == self.config.audio_eos_token_id] = table(ends)[0]
        return embeds


def _drawing(config: Any, given: Mapping[str, Any], prefix: str) -> Drawing:
    """What is left out is the checkpoint's own default."""
    made = {}
    for name, usual in _USUAL.items():
        said = given.get(prefix + name, getattr(config, name))
        made[name] = usual if said is None else said
    return Drawing.of(made)
