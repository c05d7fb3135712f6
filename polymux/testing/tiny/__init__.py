"""Tiny random-weight checkpoints of every family, in the real on-disk layouts.

Each is built with the reference libraries from a shrunken config, filled from a seed, and saved the way published
checkpoints are laid out. From the shell:

    python -m polymux.testing.tiny list
    python -m polymux.testing.tiny make NAME DIR

In tests: `make(name, folder, Ctx(dtype=torch.bfloat16))` writes one; `TINY[name]` says how to load it (`load`) and
which call shows that it works (`call`).
"""

from polymux.testing.tiny import makers as _makers  # noqa: F401  fills TINY
from polymux.testing.tiny.driver import call_pipeline, make, open_pipeline, run
from polymux.testing.tiny.lora import make_lora
from polymux.testing.tiny.registry import TINY, Ctx, Tiny, names

__all__ = ["TINY", "Ctx", "Tiny", "call_pipeline", "make", "make_lora", "names", "open_pipeline", "run"]
