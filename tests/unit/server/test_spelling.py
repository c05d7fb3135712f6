"""Messages of errors spell values as JSON does, whatever Python makes of them."""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
from fake_omni import FakeOmni, client
from pydantic import ValidationError
from test_chat_text import FakeWriter
from test_speech_route import SpeakingOmni

import polymux.server
from polymux.server.errors import from_validation
from polymux.server.protocol import Body
from polymux.spelling import shown

PYTHON = re.compile(r"None|True|False|tuple|dictionary|instance|<|=\(|b'|\{'|\['|must be [A-Z][a-z]+ ")
ODD: list[Any] = [None, True, [], [None, True], {"a": None}, "x", "", 1.5, -1, 10**400, [[]], [{"a": True}], 10**5000]


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "spelled"),
    [
        (None, "null"), (True, "true"), ((), "[]"), (("", None), '["", null]'), ({"a": (False,)}, '{"a": [false]}'),
        ("it's", '"it\'s"'), ("a", "'a'"), (1.5, "1.5"), (float("nan"), "NaN"), (Colour.RED, "'red'"),
        (b"abc", "3 bytes"), ([1] * 9, "[1, 1, 1, 1, 1, 1, ...]"), (["ä" * 99], '["' + "ä" * 27 + '..."]'),
    ],
)  # fmt: skip
def test_how_values_are_spelled(value: object, spelled: str) -> None:
    assert shown(value) == spelled


def bodies(kind: type[Body] = Body) -> Iterator[type[Body]]:
    for made in kind.__subclasses__():
        yield made
        yield from bodies(made)


@dataclass
class Only:
    """One fault of several."""

    fault: Any

    def errors(self, **how: bool) -> list[Any]:
        return [self.fault]


def test_any_odd_value_in_any_field() -> None:
    for module in pkgutil.iter_modules(polymux.server.__path__, "polymux.server."):
        importlib.import_module(module.name)
    refused = 0
    for kind in bodies():
        for name in kind.model_fields:
            for value in ODD:
                text = "1" + "0" * 5000 if value == 10**5000 else json.dumps(value)
                try:
                    kind.model_validate_json(f"{{{json.dumps(name)}: {text}}}")
                except ValidationError as error:
                    for fault in error.errors(include_url=False):
                        message = from_validation(Only(fault), kind).message  # type: ignore[arg-type]
                        assert not PYTHON.search(message) or "must be a valid bytes" in message, (kind, message)
                        refused += 1
    assert refused > 1000


@pytest.mark.parametrize(
    ("omni", "path", "fields", "said"),
    [
        (FakeWriter, "/v1/chat/completions", {"stop": ""}, 'stop=[""]: '),
        (FakeWriter, "/v1/chat/completions", {"modalities": ["audio"]}, 'modalities=["audio"]: '),
        (FakeWriter, "/v1/chat/completions", {"logit_bias": {"a": None}}, 'logit_bias={"a": null}: '),
        (FakeWriter, "/v1/chat/completions", {"top_k": True}, "top_k=true: "),
        (FakeOmni, "/v1/images/generations", {"sigmas": [None]}, "sigmas.0=null: "),
        (SpeakingOmni, "/v1/audio/speech", {"speaker_embedding": [0.5] * 9}, "speaker_embedding"),
    ],
)  # fmt: skip
def test_values_that_are_refused_behind_the_body(
    omni: type[FakeOmni], path: str, fields: dict[str, Any], said: str
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    body = {"input": "a"} if "speech" in path else body

    async def ask() -> Any:
        async with client(omni()) as http:
            return await http.post(path, json=body | fields)

    answer = asyncio.run(ask())
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith(said) and not PYTHON.search(message), message
