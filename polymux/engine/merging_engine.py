"""What the engines of models that answer have in common: steps of one token of several requests as one, on request."""

from __future__ import annotations

import torch

from polymux.config import EngineConfig
from polymux.diffusion.call import Call
from polymux.engine.decode_merging import DecodeMerger, DecodeRunner, may_be_merged
from polymux.engine.generate_model import GenerateModel
from polymux.engine.session_engine import AnyJob
from polymux.engine.transformers_engine import TransformersEngine
from polymux.errors import ConfigError
from polymux.families.chat import ChatFamily


class MergingEngine(TransformersEngine[AnyJob]):
    """Implements most of `engine.base.StageEngine`."""

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        super().__init__(config, model, device)
        assert isinstance(model.family, ChatFamily)
        self.family = model.family
        if config.scheduler.merge_decoding:
            if not _proven(model):
                what = f"merge_decoding: for {self.described.pipeline} nothing proves that it gives the same answers"
                raise ConfigError(what, param="merge_decoding")
            merger = DecodeMerger(self.family.decoders_merged, self.family.heads_merged)
            self._run_with(merger, DecodeRunner(merger, device))

    def _may_merge(self, call: Call) -> bool:
        return self.config.scheduler.merge_decoding and self.runner.may_merge(call.component.name)


def _proven(model: GenerateModel) -> bool:
    """Whether its class is one of which the family says that steps may be merged, with the attention that is known."""
    assert isinstance(model.family, ChatFamily)
    decoders = [c for c in model.components if f"{c.name}.forward" in model.family.decoders_merged]
    named = type(model.parts.model).__name__ in model.family.models
    return named and bool(decoders) and all(may_be_merged(c.module) for c in decoders)
