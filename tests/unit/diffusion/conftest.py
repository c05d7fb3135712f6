"""What several of these tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from session_bench import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()
