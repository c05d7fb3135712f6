"""The repeated blocks of a denoiser as compiled code: one compilation for all blocks of a class.

What is compiled is the forward of the blocks' class, with the block as its first argument, so that its weights are
inputs of the code. It takes the place of `forward` on each block; what hooks on blocks do stays outside, as it is. The
code sees the block as it is now: layers that adapters put in the place of others later are not in it, so that nothing
is compiled again when one comes. Where a block cannot be compiled, or not for this call, its own forward runs.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._dynamo.config import patch as dynamo_settings
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters

from polymux.compilation_config import Compilation
from polymux.diffusion.tracebacks import drop_frames
from polymux.diffusion.tuned import AdapterSet
from polymux.errors import ConfigError
from polymux.families.base import Family
from polymux.memory.containers import block_paths

log = logging.getLogger(__name__)

MOST_GRAPHS = 32  # of a class's forward; beyond, what is new runs as it is


class _Kind:
    """The blocks of one class in one denoiser."""

    def __init__(self, component: str, kind: type, settings: Compilation) -> None:
        self.component, self.name = component, kind.__name__
        mode = settings.mode if settings.backend == "inductor" else None
        self.compiled: Callable[..., Any] = torch.compile(
            kind.forward,  # type: ignore[attr-defined]  # a class of modules
            backend=settings.backend,
            dynamic=settings.dynamic,
            mode=mode,
        )
        self.works = True
        self._full = False

    def failed(self, error: Exception) -> None:
        """It did not work, and the block's own forward did."""
        if isinstance(error, FailOnRecompileLimitHit):
            if not self._full:
                message = "there are %d graphs of %s already: of what is new, blocks run eagerly"
                log.warning("compile: %s: " + message, self.component, MOST_GRAPHS, self.name)
            self._full = True
        elif self.works:
            self.works = False
            said = " ".join(str(error).split())[:400]
            message = "%s cannot be compiled, and runs eagerly from now on: %s: %s"
            log.warning("compile: %s: " + message, self.component, self.name, type(error).__name__, said)


class _Forward:
    """In the place of a block's forward."""

    def __init__(self, block: torch.nn.Module, kind: _Kind, owner: CompiledBlocks) -> None:
        self.original, self.kind, self.owner = block.forward, kind, owner
        self.block = frame_of(block)
        functools.update_wrapper(self, block.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.owner.beside():
            return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self.owner.eager or not self.kind.works:
            return self.original(*args, **kwargs)
        own, named = map(_plain, args), {name: _plain(value) for name, value in kwargs.items()}
        try:
            return self.kind.compiled(self.block, *own, **named)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            drop_frames(error)
            problem = error
        result = self.original(*args, **kwargs)  # what is wrong with the block itself is its own to say
        self.kind.failed(problem)
        return result


class CompiledBlocks:
    """Of one denoiser. `eager`: its blocks run as they are now. Without settings it has none."""

    def __init__(self, name: str, module: torch.nn.Module, family: Family, settings: Compilation) -> None:
        self.name, self.eager = name, False
        self.beside: Callable[[], AbstractContextManager[None]] = nullcontext  # around the run of each block
        self.seconds, self.graphs = 0.0, 0  # of calls that compiled something; and how much
        self._blocks = list(_blocks(module, family))
        kinds: dict[type, _Kind] = {}
        for block in self._blocks:
            kind = kinds.setdefault(type(block), _Kind(name, type(block), settings))
            block.__dict__["forward"] = _Forward(block, kind, self)
        counts = {k.name: sum(type(b) is cls for b in self._blocks) for cls, k in kinds.items()}
        self.summary = ", ".join(f"{number} × {kind}" for kind, number in counts.items())
        self._said = False

    @classmethod
    def problem(cls, module: torch.nn.Module, family: Family) -> str | None:
        """Why there is nothing to compile; None: there is."""
        try:
            blocks = list(_blocks(module, family))
        except ConfigError as error:
            return error.message
        kind = type(module).__name__
        if not blocks:
            return f"nothing tells what the repeated blocks of {kind} are"
        changed = next((type(b).__name__ for b in blocks if "forward" in b.__dict__), None)
        return None if changed is None else f"the forward of {changed} has been replaced already"

    def hooked(self) -> str | None:
        """Why what is inside the blocks cannot be compiled, as others have left it; None: it can."""
        for block in self._blocks:
            for path, layer in block.named_modules():
                if path and (layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__):
                    return f"there are hooks inside its blocks ({path} of {type(block).__name__})"
        return None

    @contextmanager
    def active(self, adapters: AdapterSet) -> Iterator[None]:
        """Around a run of the denoiser with these adapters."""
        if self.eager or adapters:
            self._say_eager()
            with self.eagerly():
                yield
            return
        before, start = _graphs(), time.perf_counter()
        with dynamo_settings(recompile_limit=MOST_GRAPHS, fail_on_recompile_limit_hit=True):
            yield
        made = _graphs() - before
        if made:
            seconds = time.perf_counter() - start
            self.graphs += made
            self.seconds += seconds
            log.info("compile: %s: %d more, %.1f s with the call that needed them", self.name, made, seconds)

    def _say_eager(self) -> None:
        if not self.eager and not self._said:
            self._said = True
            why = "each set of them, at each scale, would be compiled anew"
            log.info("compile: %s: calls with adapters run its blocks eagerly: %s", self.name, why)

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Blocks run as they are meanwhile."""
        before, self.eager = self.eager, True
        try:
            yield
        finally:
            self.eager = before

    @contextmanager
    def apart(self, leave: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Each block runs within `leave()` meanwhile."""
        before, self.beside = self.beside, leave
        try:
            yield
        finally:
            self.beside = before

    def undo(self) -> None:
        """The blocks as they were."""
        for block in self._blocks:
            if isinstance(block.__dict__.get("forward"), _Forward):
                del block.__dict__["forward"]


def frame_of(module: torch.nn.Module) -> torch.nn.Module:
    """The module with its own list of children, and so its children down to the last: these are the same ones, and all
    tensors are. What takes the place of a child of `module` is not in it."""
    if not module._modules:
        return module
    own = type(module).__new__(type(module))
    own.__dict__.update(module.__dict__)
    children = module._modules.items()
    own.__dict__["_modules"] = {name: None if child is None else frame_of(child) for name, child in children}
    return own


def _plain(value: Any) -> Any:
    """A tensor without what torch would compile anew for, though nothing comes of it: that it is a view of another one,
    as what goes into a model's first block often is, and the stride of a batch of one."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim > 1 and value.size(0) == 1 and value.is_contiguous():
        stride = value.size(1) * value.stride(1)
        if value.stride(0) != stride:
            value = value.as_strided(value.shape, (stride, *value.stride()[1:]))
    return value.data if value._is_view() else value


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def _blocks(module: torch.nn.Module, family: Family) -> Iterator[torch.nn.Module]:
    """Members of lists: what the library calls repeated, or else the blocks that are streamed."""
    named: Sequence[str] = getattr(module, "_repeated_blocks", None) or ()
    paths = [path for path, child in module.named_modules() if type(child).__name__ in named]
    paths = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
    for path in paths or block_paths(module, family.blocks):
        if isinstance(module.get_submodule(path.rpartition(".")[0]), torch.nn.ModuleList):
            yield module.get_submodule(path)
