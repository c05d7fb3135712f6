"""Importing large libraries without the search for garbage: there is hardly any, and a third of the time goes there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def many_imports() -> Iterator[None]:
    """Around imports of thousands of modules. Each makes objects that stay, and Python looks through all of them again
    and again for some that do not; here it does not look."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keep_imported() -> None:
    """All that there is stays until the process ends: it is not looked through again. For a process that has imported
    what it works with, and has made nothing yet: what is frozen here is never freed, garbage included."""
    gc.freeze()
