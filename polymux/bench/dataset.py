"""What is asked for: random words, or the prompts of a file, with fields of their own if it says so."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polymux.bench.settings import BenchSettings
from polymux.errors import ConfigError

_WORDS = """
amber arch autumn bay bird blue boat bridge bright calm castle cat cliff cloud copper corner crane dawn deep
desert dog door dusk field fire fog forest fox garden glass gold green grey harbour hill horse house ice island
lake lamp lantern leaf light lighthouse market meadow mist moon moss mountain night ocean old owl path pine
quiet rain red river road roof rose sand sea shade ship shore silver sky small snow spring star stone storm
street summer sun swan tall tower train tree valley violet wall warm water wave white wide wind window winter
wood yellow young
"""


@dataclass(frozen=True)
class Item:
    """One request's own: its prompt, and the fields that differ from those of the command line."""

    prompt: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Dataset:
    items: list[Item]
    source: dict[str, Any]  # what it was made from, for the result file


def load(settings: BenchSettings) -> Dataset:
    """As many items as there are requests. Raises ConfigError for a file that cannot be used."""
    count, path = settings.load.num_prompts, settings.request.dataset_path
    if path is None:
        chance = random.Random(settings.load.load_seed)
        words = settings.request.random_words
        prompts = [" ".join(chance.choices(_WORDS.split(), k=words)) for _ in range(count)]
        return Dataset([Item(prompt) for prompt in prompts], {"kind": "random", "words": words})
    try:
        content = Path(path).read_bytes()
        lines = content.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset_path={path!r}: cannot be read: {error}", param="dataset_path") from None
    parse = _from_json if path.endswith(".jsonl") else _from_text
    items = [parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise ConfigError(f"dataset_path={path!r}: there is no prompt in it", param="dataset_path")
    source = {"kind": "file", "path": path, "sha256": hashlib.sha256(content).hexdigest(), "prompts": len(items)}
    return Dataset(list(itertools.islice(itertools.cycle(items), count)), source)


def _from_text(path: str, number: int, line: str) -> Item:
    return Item(line.strip())


def _from_json(path: str, number: int, line: str) -> Item:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: not valid JSON: {error}", param="dataset_path") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        what = (
            f'{path}, line {number}: must be an object with a "prompt", such as {{"prompt": "a cat", "size": "64x64"}}'
        )
        raise ConfigError(what, param="dataset_path")
    return Item(fields.pop("prompt"), fields)
