"""Let PyPI's torchvision wheel, which is linked to CUDA, import beside a CPU build of torch.

The wheel's C++ operators cannot load there, and `import torchvision` dies with "operator torchvision::nms does not
exist" while it registers their fake kernels. Declaring the missing operators just before that import is enough for the
pure-Python part (transforms v2), which is all that the image and video processors of transformers use. `nms`,
`roi_align` and the image and video codecs stay unusable, so this is for tests and CPU development only.

    pip install --no-deps torchvision==0.28.0
    python -m polymux.testing.torchvision_cpu install      # for every process of this environment, spawned ones too

The installed copy of this file runs at interpreter start, so it may import neither polymux nor torch; torch is only
imported when torchvision is.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

MODULE = "_torchvision_cpu"  # name of the installed copy in site-packages
_FAKE = re.compile(r'register_(?:fake|meta)\("(?:torchvision::)?(\w+)"')


class _DeclareOperatorsFirst(importlib.abc.MetaPathFinder):
    """Finds nothing itself: declares the operators when somebody is about to import torchvision, then steps aside."""

    def __init__(self) -> None:
        self._busy = False
        self._library: object = None  # the declarations live as long as this does

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and not self._busy and self._library is None:
            self._busy = True
            try:
                self._declare()
            finally:
                self._busy = False
        return None

    def _declare(self) -> None:
        spec = importlib.util.find_spec("torchvision")
        if spec is None or not spec.submodule_search_locations:
            return
        import torch

        if torch.version.cuda is not None:
            return
        source = Path(spec.submodule_search_locations[0], "_meta_registrations.py").read_text(encoding="utf-8")
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        missing = {name for name in _FAKE.findall(source) if not hasattr(torch.ops.torchvision, name)}
        for name in sorted(missing):
            library.define(f"{name}(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
        self._library = library


def enable() -> None:
    """Make a later `import torchvision` of this process work; does nothing the second time, or beside a CUDA torch."""
    ours = _DeclareOperatorsFirst.__name__  # by name, since the installed copy has a class of its own
    if not any(type(finder).__name__ == ours for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeclareOperatorsFirst())


def install(site_packages: Path) -> str:
    """Copy this file and a .pth that enables it into `site_packages`. Returns what was done, in one line."""
    if importlib.util.find_spec("torchvision") is None:
        return "nothing done: torchvision is not installed"
    import torch

    if torch.version.cuda is not None:
        return f"nothing done: torch {torch.__version__} is a CUDA build, torchvision works as it is"
    wanted = {
        site_packages / f"{MODULE}.py": Path(__file__).read_text(encoding="utf-8"),
        site_packages / f"{MODULE}.pth": f"import {MODULE}; {MODULE}.enable()\n",
    }
    if all(file.exists() and file.read_text(encoding="utf-8") == text for file, text in wanted.items()):
        return f"nothing done: already installed in {site_packages}"
    for file, text in wanted.items():
        file.write_text(text, encoding="utf-8")
    return f"installed {' and '.join(file.name for file in wanted)} in {site_packages}"


def main(argv: list[str]) -> int:
    if argv != ["install"]:
        print("usage: python -m polymux.testing.torchvision_cpu install", file=sys.stderr)
        return 2
    import sysconfig

    print(install(Path(sysconfig.get_paths()["purelib"])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
