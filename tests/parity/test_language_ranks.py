"""Answers of language models that ranks share are those of one rank, and no rank has all of the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from .language_ranks import ROUNDED, WAYS
from .test_paged_answers import CLASSES

TESTS = Path(__file__).parents[1]


def test_tokens_are_those_of_one_rank(tmp_path: Path) -> None:
    """Greedy and drawn, held to a form, beside others that leave, with prompts in parts, found and preempted."""
    words = [sys.executable, "-m", "parity.language_ranks", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))}
    ran = subprocess.run(words, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    said = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    wanted = [(name, size) for size in WAYS for name in (*CLASSES, ROUNDED)]
    assert [(one["class"], one["ranks"]) for one in said] == wanted
    for one in said:
        assert one["same"] == dict.fromkeys(WAYS[one["ranks"]], True), one
        most = 0.75 if one["class"] == "MistralForCausalLM" else 1.2 / one["ranks"]  # its vocabulary is whole
        assert one["share"] < most, one
