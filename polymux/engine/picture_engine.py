"""The engine of a stage whose model of transformers writes pictures token by token, and answers conversations too.

A picture is one session: the model's own `generate` and its decoder, as a coroutine of calls of its modules. Answers
are those of `chat_engine`, whose calls are interleaved with those of pictures. Knows requests and the queue between
them; not what a model computes, and nothing of processes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from PIL import Image

from polymux.config import EngineConfig
from polymux.diffusion.outputs import finite_array
from polymux.diffusion.session import Session
from polymux.engine.chat_engine import ChatEngine
from polymux.engine.chat_job import PreparedJob
from polymux.engine.chat_model import described
from polymux.engine.generate_model import GenerateModel
from polymux.engine.job import randomness_of
from polymux.engine.picture_job import PictureJob
from polymux.engine.sound_job import StepTap
from polymux.engine.warmup import run_first_that_works
from polymux.errors import InvalidRequestError
from polymux.families.generate import Parts
from polymux.families.pictures import DRAWN, PictureCall, PictureFamily, PictureWish
from polymux.media.wire import Array, to_wire
from polymux.request import Capabilities, OmniDiffusionSamplingParams, Request


class PictureEngine(ChatEngine):
    """Implements `engine.base.StageEngine` for models of transformers that make pictures."""

    def __init__(self, config: EngineConfig, model: GenerateModel, device: torch.device) -> None:
        super().__init__(config, model, device)
        assert isinstance(model.family, PictureFamily)
        self.family: PictureFamily = model.family

    def _describe(self, model: GenerateModel, config: EngineConfig) -> Capabilities:
        family, parts = model.family, model.parts
        assert isinstance(family, PictureFamily)
        canvas = family.adapter.canvas(parts)
        answers = replace(described(model, config), modality="text") if family.adapter.answers(parts) else None
        size = ("height", "width")
        return replace(
            model.facts(),
            arguments=("prompt", *size, *family.picture_arguments, *DRAWN),
            required=("prompt",),
            samples=False,
            extra=DRAWN,
            size_multiple=canvas.multiple or 1,
            fixed_size=canvas.multiple is None,
            defaults={"height": canvas.height, "width": canvas.width},
            refused={"partial_images": "a picture is there only when its last token is written"},
            makes=("image",) if answers is None else ("image", "text"),
            merges=config.scheduler.merge_decoding and family.pictures_merged,
            answers=answers,
        )

    def _job_of(self, request: Request) -> PreparedJob:
        if self.described.asked_by(request) is not self.described:
            return super()._job_of(request)
        if request.generator_state is not None:
            what = "generator: the model draws tokens of a seed; give that"
            raise InvalidRequestError(what, param="generator")
        params = request.params
        if params.num_outputs_per_prompt > 1 and params.extra_args.get("do_sample") is False:
            what = f"num_outputs_per_prompt={params.num_outputs_per_prompt}: must be 1 with do_sample = false, which"
            raise InvalidRequestError(f"{what} makes one picture for all seeds", param="num_outputs_per_prompt")
        wish = self._wish(request, params)
        planning = self._thread.submit(self._plan, self.loaded.parts, wish)
        return PictureJob(request=request, randomness=randomness_of(request), preparing=planning)

    def _wish(self, request: Request, params: OmniDiffusionSamplingParams) -> PictureWish:
        own = self.described.defaults
        return PictureWish(
            prompt=request.prompt or "",
            width=params.width or own["width"],
            height=params.height or own["height"],
            negative_prompt=request.negative_prompt,
            guidance_scale=params.guidance_scale,
            drawing=params.extra_args,
        )

    def _plan(self, parts: Parts, wish: PictureWish) -> PictureCall:
        """In the thread."""
        with torch.no_grad():
            return self.family.adapter.plan(parts, wish)

    def _open(self, job: PreparedJob) -> None:
        if not isinstance(job, PictureJob):
            super()._open(job)
            return
        session, call = self._new_session(job), job.call
        assert call is not None
        session.tap = StepTap(self.family.steps, session.steps)
        session.steps.total = call.steps
        self._start(job, session, lambda own: finite_array(self.family.adapter.draw(own, call)))

    def _done(self, job: PreparedJob, session: Session, result: Any) -> None:
        if not isinstance(job, PictureJob):
            super()._done(job, session, result)
            return
        as_floats = job.request.params.output_type == "np"
        job.outputs[session.index] = [to_wire(result if as_floats else picture_of(result))]

    def warm_up(self) -> None:
        """Make one small picture, and one small answer. Raises what they raised."""
        width, height = self.family.adapter.smallest(self.loaded.parts)
        params = OmniDiffusionSamplingParams(width=width, height=height, seed=0)
        prompt = self.family.adapter.sample_text(self.loaded.parts)
        run_first_that_works(self, [Request(request_id="warm-up", prompt=prompt, params=params)])
        if self.described.answers is not None:
            super().warm_up()


def picture_of(pixels: Array) -> Image.Image:
    """Of (height, width, channels) from 0 to 1; what lies between two values is the lower one, as for transformers."""
    return Image.fromarray((pixels * 255).astype(np.uint8))
