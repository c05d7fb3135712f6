"""Whatever fits the OpenAPI schema, or nearly does, gets an answer that the schema announces, and never a 5xx.

Derandomized: the same examples in every run.
"""

from __future__ import annotations

import warnings
from typing import Any

import msgspec
import pytest
import schemathesis
from fake_omni import CAPABILITIES, FakeOmni
from hypothesis import settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from polymux.knobs import build
from polymux.server.app import build_app
from polymux.server.state import ServerState
from polymux.server_config import ServerConfig

EXAMPLES = 20  # per route
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


class Wakeful(FakeOmni):
    """Does not fall asleep: everything after it would be refused."""

    async def sleep(self, level: int) -> int:
        return 0


def application() -> Any:
    omni = Wakeful(max_generated_image_size=4096, max_num_outputs=3)
    omni.capabilities = msgspec.structs.replace(CAPABILITIES, media={"image": 2, "mask_image": 1})
    return build_app(ServerState(omni, build(ServerConfig, {"media_fetch": False})))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schema = schemathesis.openapi.from_asgi("/openapi.json", application())


@schema.parametrize()
@settings(max_examples=EXAMPLES)
def test_every_answer_is_one_that_the_schema_announces(case: schemathesis.Case) -> None:
    case.headers.pop("x-request-timeout", None)  # which may well be over
    case.call_and_validate(checks=CHECKS)


def test_there_are_routes_to_try() -> None:
    assert len([*schema.get_all_operations()]) > 10


pytestmark = pytest.mark.filterwarnings("ignore")
