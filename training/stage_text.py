"""Second stage: the text encoder learns to read captions, before and apart from any picture.

A caption is followed by five tokens of the chat template. Each of them is asked its own questions (`pool.QUESTIONS`):
the first what the first thing looks like, and so on. Once all are answered, a picture's attributes stand at fixed
tokens, linearly decodable, and the denoiser need not learn to read. The answering layer is thrown away and the encoder
stays as it is from then on.
"""

from __future__ import annotations

from collections.abc import Callable

import diffusers as D
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import components, fast
from training.captured import Repeated
from training.optim import Optimizer, split
from training.pool import QUESTIONS, WORDS, Pool, encode, template
from training.run import Pace, Run

PEAK_RATE = 2e-3
EMPTY_PROMPTS = [" ", ""]
_ANSWERS = [sum(slot) for slot in QUESTIONS]


def encoder(pipe: D.QwenImagePipeline, run: Run) -> fast.TextEncoder:
    before = template(pipe.prompt_template_encode)[0]
    ids = pipe.tokenizer(before).input_ids
    if len(ids) != components.TEMPLATE_TOKENS:
        raise ValueError(f"the template has {len(ids)} tokens; the pipeline cuts {components.TEMPLATE_TOKENS} off")
    return fast.TextEncoder(pipe.text_encoder, torch.tensor(ids, device=run.device))


class Reader(nn.Module):
    """Answers from the hidden states of the tokens after a caption: one linear layer per token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, number) for number in _ANSWERS)

    def forward(self, words: Tensor, lengths: Tensor) -> list[Tensor]:
        """One (batch, classes) tensor per question, in the order of `Pool.labels`."""
        rows = torch.arange(len(words), device=words.device)
        answers: list[Tensor] = []
        for slot, head in enumerate(self.heads):
            state = words[rows, lengths - len(QUESTIONS) + slot]
            answers += head(state).float().split(QUESTIONS[slot], dim=-1)
        return answers


def _put(values: object, run: Run) -> Tensor:
    return torch.as_tensor(values, device=run.device).long()


def train(pipe: D.QwenImagePipeline, pool: Pool, run: Run, pace: Pace, batch: int) -> Reader:
    """Trains in place; returns the answering layer, for `accuracy`."""
    run.reseed(2)
    encode_ids = encoder(pipe, run)
    reader = Reader(pipe.text_encoder.config.text_config.hidden_size).to(run.device)
    text = pipe.text_encoder.model.language_model
    hidden, others = split(text.named_parameters(), lambda name, p: p.ndim == 2 and "embed" not in name)
    optimizer = Optimizer(hidden, [*others, *reader.parameters()], decay=0.01)
    ids, lengths, labels = (_put(v, run) for v in (pool.ids, pool.lengths, pool.labels))

    def step() -> Tensor:
        row = torch.randint(len(ids), (batch,), device=run.device)
        wording = torch.randint(ids.shape[1], (batch,), device=run.device)
        optimizer.zero_grad()
        with run.autocast():
            answers = reader(encode_ids(ids[row, wording]), lengths[row, wording])
        asked = torch.stack([F.cross_entropy(a, q) for a, q in zip(answers, labels[row].unbind(1), strict=True)])
        asked.mean().backward()
        optimizer.clip(1.0)
        optimizer.step()
        return asked.mean().detach()

    repeated = Repeated("text", step, run)
    for number in pace:
        optimizer.set_rate(pace.rate(PEAK_RATE, warmup=100))
        loss = repeated()
        if number % 50 == 0:
            run.note("caption questions", number, float(loss))
            if number % 500 == 0:
                run.log(f"text step {number} loss {float(loss):.4f} {number / pace.spent():.1f}/s")
    run.log(f"text done: {pace.step} steps of {batch} in {pace.spent():.0f} s")
    return reader


@torch.no_grad()
def accuracy(pipe: D.QwenImagePipeline, reader: Reader, scenes: Pool, run: Run) -> float:
    """The share of captions with all questions answered rightly."""
    ids, lengths, labels = (_put(v, run) for v in (scenes.ids[:, 0], scenes.lengths[:, 0], scenes.labels))
    answers = reader(encoder(pipe, run)(ids), lengths)
    right = torch.stack([a.argmax(-1) == q for a, q in zip(answers, labels.unbind(1), strict=True)])
    return float(right.all(0).float().mean())


@torch.no_grad()
def to_words(pipe: D.QwenImagePipeline, pool: Pool, run: Run, chunk: int = 4096) -> Tensor:
    """All captions as the denoiser will see them: (scenes, wordings, WORDS, width)."""
    encode_ids = encoder(pipe, run)
    store = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    width = pipe.text_encoder.config.text_config.hidden_size
    result = torch.empty(*pool.ids.shape, width, dtype=store, device=run.device)
    flat, ids = result.view(-1, WORDS, width), torch.from_numpy(pool.ids).view(-1, WORDS)
    for begin in range(0, len(ids), chunk):
        part = _put(ids[begin : begin + chunk], run)
        with run.autocast():
            flat[begin : begin + chunk] = encode_ids(part).to(store)
    run.log(f"embeddings of {len(ids)} captions")
    return result


def fits(pipe: D.QwenImagePipeline) -> Callable[[str], bool]:
    """Whether a caption is short enough for the window of training."""
    around = template(pipe.prompt_template_encode)
    return lambda text: int(encode(pipe.tokenizer, [text], around, cut=True)[1][0]) <= WORDS


@torch.no_grad()
def of_texts(pipe: D.QwenImagePipeline, texts: list[str], run: Run) -> tuple[Tensor, Tensor]:
    """Embeddings (texts, WORDS, width) and lengths."""
    ids, lengths = encode(pipe.tokenizer, texts, template(pipe.prompt_template_encode))
    return encoder(pipe, run)(_put(ids, run)), _put(lengths, run)
