"""One server for all tests that do not end it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_process import Server, serving

FLAGS = ("--max-num-seqs", "4", "--max-inference-steps", "200000", "--max-body-bytes", "1000000")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("demo", tmp_path_factory.mktemp("server"), *FLAGS) as running:
        yield running
