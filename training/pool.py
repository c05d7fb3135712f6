"""The training set: scenes and captions as arrays, made by many processes from one seed."""

from __future__ import annotations

import functools
import multiprocessing
import random
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import transformers as T

from training import captions, components
from training.render import WIDTH, record
from training.scenes import BACKGROUNDS, CANVASES, COLOURS, PLACES, RELATIONS, SHAPES, SIZES, TEXTURES, Scene, sample

WORDS = 44  # tokens of a caption with the template's tail
WORDINGS = 2  # captions per scene
SHARES = (0.6, 0.2, 0.2)  # of the canvases
CLASSES = (len(SHAPES), len(COLOURS), len(TEXTURES), len(SIZES)) * 3 + (
    len(PLACES),
    len(RELATIONS),
    4,
    len(BACKGROUNDS),
)
"""What the text encoder is asked about a caption: looks of up to three things, place, relation, number, background."""

_CHUNK = 2000


@dataclass
class Pool:
    records: npt.NDArray[np.float32]  # (scenes, WIDTH)
    ids: npt.NDArray[np.int16]  # (scenes, WORDINGS, WORDS)
    lengths: npt.NDArray[np.int16]  # (scenes, WORDINGS)
    labels: npt.NDArray[np.int16]  # (scenes, len(CLASSES)); -1 where the caption does not say
    canvas: npt.NDArray[np.int16]  # (scenes,) index into CANVASES


def template(pipeline_template: str) -> tuple[str, str]:
    """What the pipeline puts before and after a prompt."""
    before, after = pipeline_template.split("{}")
    return before, after


def encode(tok: T.Qwen2Tokenizer, texts: list[str], around: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids after the template's head, padded to WORDS, and their numbers."""
    ids = np.full((len(texts), WORDS), tok.pad_token_id, dtype=np.int16)
    lengths = np.zeros(len(texts), dtype=np.int16)
    for i, row in enumerate(tok([around[0] + text + around[1] for text in texts]).input_ids):
        row = row[components.TEMPLATE_TOKENS :]
        if len(row) > WORDS:
            raise ValueError(f"a caption of {len(row)} tokens, more than {WORDS}: {texts[i]!r}")
        ids[i, : len(row)] = row
        lengths[i] = len(row)
    return ids, lengths


def labels(scene: Scene) -> list[int]:
    """Class numbers in the order of CLASSES."""
    shown = scene.things[:1] if scene.kind == "many" else scene.things
    looks = [
        number
        for t in shown
        for number in (
            SHAPES.index(t.shape),
            tuple(COLOURS).index(t.colour),
            TEXTURES.index(t.texture),
            tuple(SIZES).index(t.size) if t.says_size else -1,
        )
    ]
    looks += [-1] * (12 - len(looks))
    place = tuple(PLACES).index(scene.place) if scene.place else -1
    relation = RELATIONS.index(scene.relation) if scene.relation else -1
    background = tuple(BACKGROUNDS).index(scene.background[0]) if scene.says_background else -1
    return [*looks, place, relation, len(scene.things) - 1, background]


@functools.cache
def _tokenizer() -> T.Qwen2Tokenizer:
    return components.tokenizer()


def _chunk(job: tuple[int, int, int, tuple[str, str]]) -> Pool:
    """One process's share; the job is (seed, canvas, number, template)."""
    seed, canvas, number, around = job
    rng = random.Random(seed)
    scenes = [sample(rng, CANVASES[canvas]) for _ in range(number)]
    texts = [captions.caption(scene, rng) for scene in scenes for _ in range(WORDINGS)]
    ids, lengths = encode(_tokenizer(), texts, around)
    return Pool(
        records=np.stack([record(scene) for scene in scenes]).reshape(number, WIDTH),
        ids=ids.reshape(number, WORDINGS, WORDS),
        lengths=lengths.reshape(number, WORDINGS),
        labels=np.array([labels(scene) for scene in scenes], dtype=np.int16),
        canvas=np.full(number, canvas, dtype=np.int16),
    )


def build(number: int, seed: int, workers: int, around: tuple[str, str]) -> Pool:
    """`number` scenes (about), sorted by canvas. Call it before CUDA starts: it forks."""
    jobs = []
    for canvas, share in enumerate(SHARES):
        for k in range(max(1, round(number * share / _CHUNK))):
            size = min(_CHUNK, max(1, round(number * share)))
            jobs.append((seed * 1_000_003 + canvas * 100_003 + k, canvas, size, around))
    if workers > 1:
        with multiprocessing.get_context("fork").Pool(workers) as processes:
            parts = processes.map(_chunk, jobs, chunksize=1)
    else:
        parts = [_chunk(job) for job in jobs]
    return Pool(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Pool)})
