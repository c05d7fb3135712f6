"""What a process must not import, because it would take longer than its own work."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
from source_tree import ROOT

from polymux.importing import many_imports

OF_TRANSFORMERS = ("answering", "decode_engine", "generate_engine", "hearing_engine", "picture_engine", "talk_engine")
OF_TRANSFORMERS += ("ar_engine", "chat_engine", "think_engine", "write_engine")
# What nobody needs to read or write a model of transformers; what the libraries themselves import is not ours to say.
RARE = ("diffusers", "bitsandbytes", "peft", "gguf", "cache_dit", "scipy.stats", "ray")


def test_engines_of_transformers_import_no_diffusers() -> None:
    """All of them in one process, with what they load models with, after the choice of an engine."""
    names = ["engine.engines", "loading.generate", *(f"engine.{name}" for name in OF_TRANSFORMERS)]
    program = f"import importlib, sys\nfor name in {names}: importlib.import_module(f'polymux.{{name}}')\n"
    program += f"print([name for name in {RARE} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_no_search_for_garbage_while_importing() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), many_imports():
        with many_imports():
            assert not gc.isenabled()
        assert not gc.isenabled()  # the outer one has not ended
        raise ImportError
    assert gc.isenabled()
