"""The training set: scenes and captions as arrays, made by many processes from one seed."""

from __future__ import annotations

import functools
import multiprocessing
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import transformers as T

from training import captions, components
from training.render import WIDTH, record
from training.scenes import BACKGROUNDS, CANVASES, COLOURS, PLACES, RELATIONS, SHAPES, SIZES, TEXTURES, Scene, sample

WORDS = 32  # tokens of a training caption with the template's tail; scenes with longer ones are left out
WORDINGS = 3  # captions per scene
SHARES = (0.6, 0.2, 0.2)  # of the canvases
_LOOK = (len(SHAPES) + 1, len(COLOURS) + 1, len(TEXTURES) + 1, len(SIZES) + 1)
QUESTIONS = (
    _LOOK,  # of the first thing, the second, the third
    _LOOK,
    _LOOK,
    (4, len(BACKGROUNDS) + 1, len(BACKGROUNDS) + 1),  # number of things; background at the top and at the bottom
    (len(PLACES) + 1, len(RELATIONS) + 1),
)
"""What each of the five tokens after a caption must know of it: numbers of classes; class 0 is what it doesn't say."""

_CHUNK = 2000
Job = tuple[int, int, int, tuple[str, str], bool]  # seed, canvas, number, template, whether of the held-out part


@dataclass
class Pool:
    records: npt.NDArray[np.float32]  # (scenes, WIDTH)
    ids: npt.NDArray[np.int16]  # (scenes, WORDINGS, WORDS)
    lengths: npt.NDArray[np.int16]  # (scenes, WORDINGS)
    labels: npt.NDArray[np.int16]  # (scenes, answers), in the order of QUESTIONS
    canvas: npt.NDArray[np.int16]  # (scenes,) index into CANVASES


def template(pipeline_template: str) -> tuple[str, str]:
    """What the pipeline puts before and after a prompt."""
    before, after = pipeline_template.split("{}")
    return before, after


def encode(
    tok: T.Qwen2Tokenizer, texts: list[str], around: tuple[str, str], cut: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids after the template's head, padded to WORDS, and their numbers; the number of a `cut` one is larger."""
    ids = np.full((len(texts), WORDS), tok.pad_token_id, dtype=np.int16)
    lengths = np.zeros(len(texts), dtype=np.int16)
    for i, row in enumerate(tok([around[0] + text + around[1] for text in texts]).input_ids):
        row = row[components.TEMPLATE_TOKENS :]
        if len(row) > WORDS and not cut:
            raise ValueError(f"a caption of {len(row)} tokens, more than {WORDS}: {texts[i]!r}")
        lengths[i] = len(row)
        ids[i, : len(row)] = row[:WORDS]
    return ids, lengths


def labels(scene: Scene) -> list[int]:
    """The answers to QUESTIONS, one after the other."""
    shown = scene.things[:1] if scene.kind == "many" else scene.things
    looks = [
        1 + number
        for t in shown
        for number in (
            SHAPES.index(t.shape),
            tuple(COLOURS).index(t.colour),
            TEXTURES.index(t.texture),
            tuple(SIZES).index(t.size) if t.says_size else -1,
        )
    ]
    looks += [0] * (len(_LOOK) * 3 - len(looks))
    background = [1 + tuple(BACKGROUNDS).index(b) if scene.says_background else 0 for b in scene.background]
    place = 1 + tuple(PLACES).index(scene.place) if scene.place else 0
    relation = 1 + RELATIONS.index(scene.relation) if scene.relation else 0
    return [*looks, len(scene.things) - 1, *background, place, relation]


@functools.cache
def _tokenizer() -> T.Qwen2Tokenizer:
    return components.tokenizer()


def _chunk(job: Job) -> Pool:
    """One process's share. A little more is made, for what is too long."""
    seed, canvas, number, around, held_out = job
    rng = random.Random(seed)
    scenes = [sample(rng, CANVASES[canvas], held_out=held_out) for _ in range(number + number // 20 + 5)]
    texts = [captions.caption(scene, rng) for scene in scenes for _ in range(WORDINGS)]
    ids, lengths = (a.reshape(len(scenes), WORDINGS, -1) for a in encode(_tokenizer(), texts, around, cut=True))
    kept = np.flatnonzero((lengths <= WORDS).all(axis=(1, 2)))[:number]
    return Pool(
        records=np.stack([record(scenes[i]) for i in kept]).reshape(len(kept), WIDTH),
        ids=ids[kept],
        lengths=lengths[kept, :, 0],
        labels=np.array([labels(scenes[i]) for i in kept], dtype=np.int16),
        canvas=np.full(len(kept), canvas, dtype=np.int16),
    )


def _joined(parts: Iterable[Pool]) -> Pool:
    every = list(parts)
    return Pool(**{f.name: np.concatenate([getattr(part, f.name) for part in every]) for f in fields(Pool)})


class Makers:
    """Worker processes that make pools. Start them before CUDA: they are forks."""

    def __init__(self, workers: int, around: tuple[str, str]) -> None:
        self.around = around
        _tokenizer()
        self._processes = multiprocessing.get_context("fork").Pool(workers) if workers > 1 else None

    def start(self, number: int, seed: int, held_out: bool = False) -> Callable[[], Pool]:
        """`number` scenes (about), sorted by canvas; calling the result waits for them."""
        jobs = []
        for canvas, share in enumerate(SHARES):
            for k in range(max(1, round(number * share / _CHUNK))):
                size = min(_CHUNK, max(1, round(number * share)))
                jobs.append((seed * 1_000_003 + canvas * 100_003 + k, canvas, size, self.around, held_out))
        if self._processes is None:
            return functools.cache(lambda: _joined(map(_chunk, jobs)))
        pending = self._processes.map_async(_chunk, jobs, chunksize=1)
        return functools.cache(lambda: _joined(pending.get()))

    def close(self) -> None:
        if self._processes is not None:
            self._processes.terminate()


def build(number: int, seed: int, around: tuple[str, str], held_out: bool = False) -> Pool:
    """`number` scenes (about), sorted by canvas, made in this process."""
    return Makers(1, around).start(number, seed, held_out)()
