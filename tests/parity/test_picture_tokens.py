"""Tiny models that write pictures token by token: through the engine, alone and with neighbours that ask otherwise, the
pictures are those of transformers' own `generate` and decoder, and the answers between them those of its `generate`.

fp32 on a CPU. Calls are interleaved and not merged, so the same operations run in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image

from polymux.config import EngineConfig
from polymux.engine.picture_engine import PictureEngine
from polymux.families import all_generate_families
from polymux.families.chat import Question
from polymux.families.emu3 import _conversed
from polymux.families.generate import Parts
from polymux.families.pictures import PictureFamily
from polymux.media.wire import from_wire, to_wire
from polymux.request import Failed, Finished, Message, OmniDiffusionSamplingParams, Part, Request, SamplingParams
from polymux.testing.tiny.inputs import picture

Pixels = np.ndarray[Any, Any]
SEED = 5
PROMPT = "a red cat"


@dataclass(frozen=True)
class Draw:
    """A picture to make, in the words of a request."""

    name: str
    prompt: str = PROMPT
    size: tuple[int, int] | None = None
    negative: str | None = None
    guidance: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def request(self, name: str, seed: int = SEED, n: int = 1, **more: Any) -> Request:
        width, height = self.size or (None, None)
        params = OmniDiffusionSamplingParams(
            width=width, height=height, guidance_scale=self.guidance, seed=seed, extra_args=self.extra,
            num_outputs_per_prompt=n, output_type="np", **more,
        )  # fmt: skip
        return Request(request_id=name, prompt=self.prompt, negative_prompt=self.negative, params=params)


JANUS = (
    Draw("plain"),
    Draw("guided", "two people walk along the river", guidance=2.0, extra={"temperature": 0.7, "top_k": 12}),
    Draw("greedy", guidance=3.0, extra={"do_sample": False}),
)
EMU3 = (
    Draw("square", size=(32, 32)),
    Draw("wide", "a large wooden table", size=(64, 24), negative="low quality", guidance=2.5),
    Draw("unguided", size=(16, 48), guidance=1.0, extra={"top_p": 0.9, "temperature": 1.2}),
)


def statistics(pixels: Any, processor: Any) -> Pixels:
    """By transformers' own words: what was normalized is brought back."""
    mean, std = (np.asarray(v)[:, None, None] for v in (processor.image_mean, processor.image_std))
    return np.clip(pixels.numpy() * std + mean, 0, 1).transpose(1, 2, 0)


def how(draw: Draw) -> dict[str, Any]:
    return {"do_sample": True} | draw.extra | ({} if draw.guidance is None else {"guidance_scale": draw.guidance})


def said(text: str, *shown: Any) -> list[dict[str, Any]]:
    pictures = [{"type": "image"} for _ in shown]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]


def janus(path: Path) -> tuple[Any, Any, Callable[[Draw, int], Pixels]]:
    model, processor = T.JanusForConditionalGeneration.from_pretrained(path), T.AutoProcessor.from_pretrained(path)
    model.generation_config.generation_kwargs = {"boi_token_id": processor.tokenizer.boi_token_id}  # loading drops it

    def drawn(draw: Draw, seed: int = SEED) -> Pixels:
        text = processor.apply_chat_template(said(draw.prompt), add_generation_prompt=True)
        inputs = processor(text=text, generation_mode="image", return_tensors="pt")
        torch.manual_seed(seed)
        tokens = model.generate(**inputs, generation_mode="image", **how(draw))
        made = model.decode_image_tokens(tokens)[0].permute(2, 0, 1)
        return statistics(made, processor.image_processor)

    return model, processor, drawn


def emu3(path: Path) -> tuple[Any, Any, Callable[[Draw, int], Pixels]]:
    model, processor = T.Emu3ForConditionalGeneration.from_pretrained(path), T.AutoProcessor.from_pretrained(path)
    tok = processor.tokenizer

    def drawn(draw: Draw, seed: int = SEED) -> Pixels:
        assert draw.size is not None
        width, height = (side // 8 for side in draw.size)
        text = f"{draw.prompt}{tok.boi_token}{height}*{width}{tok.image_wrapper_token}"
        inputs = processor(text=text, return_tensors="pt")
        begin = int(torch.nonzero(inputs["input_ids"][0] == tok.image_wrapper_token_id)[0])

        def allowed(batch: int, ids: torch.Tensor) -> Any:
            offset, last = ids.shape[0] - begin, (width + 1) * height
            if offset > last:
                return [(tok.eof_token_id, tok.eoi_token_id, tok.eos_token_id)[offset - last - 1]]
            row_ends = offset % (width + 1) == 0
            return [tok.convert_tokens_to_ids("<|extra_200|>")] if row_ends else model.vocabulary_mapping.image_tokens

        negative = {}
        if draw.negative is not None:
            other = processor(text=draw.negative, return_tensors="pt")
            negative = {"negative_prompt_ids": other.input_ids, "negative_prompt_attention_mask": other.attention_mask}
        torch.manual_seed(seed)
        out = model.generate(
            **inputs, **negative, **how(draw), max_new_tokens=500, prefix_allowed_tokens_fn=allowed
        )  # ends by itself
        made = model.decode_image_tokens(
            image_tokens=out[:, inputs["input_ids"].shape[1] :], height=height, width=width
        )
        return statistics(made.reshape(made.shape[-3:]), processor.image_processor)

    return model, processor, drawn


CASES = {
    "janus": (janus, JANUS, "JanusForConditionalGeneration"),
    "emu3": (emu3, EMU3, "Emu3ForConditionalGeneration"),
}


def drive(engine: PictureEngine) -> dict[str, Finished | Failed]:
    ends: dict[str, Finished | Failed] = {}
    while engine.busy:
        ends |= {e.request_id: e for e in engine.step() if isinstance(e, (Finished, Failed))}
    return ends


def pixels(end: Finished | Failed) -> list[Pixels]:
    assert isinstance(end, Finished), end
    assert end.modality == "image"
    return [np.asarray(from_wire(medium)) for (medium,) in end.outputs]


def test_every_family_is_here() -> None:
    declared = {name for f in all_generate_families() if isinstance(f, PictureFamily) for name in f.models}
    assert {name for _, _, name in CASES.values()} == declared


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_pictures_and_answers_are_those_of_transformers(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint(name)
    load, draws, _ = CASES[name]
    model, processor, drawn = load(path)
    wanted = {draw.name: drawn(draw, SEED) for draw in draws}
    chat = processor.apply_chat_template(said("what is it?", None), add_generation_prompt=True)
    inputs = processor(text=chat, images=[picture(56, 40)], return_tensors="pt")
    torch.manual_seed(SEED)
    ids = model.generate(**inputs, max_new_tokens=9, do_sample=True, temperature=0.8, guidance_scale=None)
    text = processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    engine = PictureEngine.load(EngineConfig.from_flat(model=str(path), max_num_seqs=16))
    try:
        engine.warm_up()
        first = draws[0]
        engine.add(first.request("alone", n=2))
        alone = pixels(drive(engine)["alone"])
        assert np.allclose(alone[0], wanted[first.name], rtol=0, atol=1e-4)
        assert np.allclose(alone[1], drawn(first, SEED + 1), rtol=0, atol=1e-4)
        for draw in draws:
            engine.add(draw.request(draw.name))
            engine.add(draw.request(f"other-{draw.name}", seed=77))
        question = Message("user", [Part("image"), Part("text", "what is it?")])
        sampling = SamplingParams(seed=SEED, max_new_tokens=9, temperature=0.8)
        media = {"image": [to_wire(picture(56, 40))]}
        engine.add(Request(request_id="asks", messages=[question], media=media, sampling=sampling))
        ends = drive(engine)
        for draw in draws:
            (made,) = pixels(ends[draw.name])
            assert made.shape == wanted[draw.name].shape
            assert np.allclose(made, wanted[draw.name], rtol=0, atol=1e-4)
            assert isinstance(ends[f"other-{draw.name}"], Finished)
        answer = ends["asks"]
        assert isinstance(answer, Finished) and answer.text == text and answer.modality == "text"
    finally:
        engine.close()


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_merged_steps_choose_the_same_tokens(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """With steps of different requests run as one, of pictures and of answers: what each of them is alone."""
    draws = CASES[name][1]
    folder = str(tiny_checkpoint(name))

    def engine(**flags: Any) -> PictureEngine:
        return PictureEngine.load(EngineConfig.from_flat(model=folder, max_num_seqs=16, **flags))

    asked = [draw.request(f"{draw.name}-{seed}", seed=seed) for seed in range(2) for draw in draws[:2]]
    for i in range(2):
        message = Message("user", [Part("text", "hello" * (i + 1))])
        how = SamplingParams(seed=i, max_new_tokens=12, temperature=1.0)
        asked.append(Request(request_id=f"asks-{i}", messages=[message], sampling=how))
    ends = []
    for one in (engine(), engine(merge_decoding=True)):
        for request in asked:
            one.add(request)
        wait(job.preparing for job in one.jobs.values())  # so that they are under way together
        ends.append(drive(one))
        decoder = one.family.decoders_merged[0].removesuffix(".forward")
        each = one.stats.merged[decoder] / one.stats.calls[decoder]  # calls that a run answers
        assert (each > 1) == one.config.scheduler.merge_decoding and one.runner.unmergeable == set()
        assert (each > 1.4) == one.capabilities.merges
        one.close()
    plain, merged = ends
    for request in asked:
        a, b = plain[request.request_id], merged[request.request_id]
        assert isinstance(a, Finished) and isinstance(b, Finished)
        assert a.text == b.text
        if a.modality == "image":
            assert np.allclose(pixels(a), pixels(b), rtol=0, atol=1e-4)


def test_a_picture_of_three_rows_is_not_taken_for_one_of_three_channels(tiny_checkpoint: Callable[..., Path]) -> None:
    parts = Parts(model=None, processor=T.AutoProcessor.from_pretrained(tiny_checkpoint("emu3")))
    tall, wide = (
        _conversed(
            parts,
            Question(
                messages=[Message("user", [Part("image"), Part("text", "what is it?")])],
                params=SamplingParams(),
                pictures=[Image.new("RGB", size)],
            ),
        )
        for size in ((3, 50), (50, 3))
    )
    (rows, columns), (others, more) = tall["image_sizes"].tolist()[0], wide["image_sizes"].tolist()[0]
    assert (rows, columns) == (more, others) and rows > columns
