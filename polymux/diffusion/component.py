"""The components of a pipeline, and the capture of the calls that sessions make of them.

Capture replaces `forward` (for autoencoders `encode` and `decode`) on the instance, and `forward` of the submodules
that a pipeline may call past their component. Outside a session the original runs, so the pipeline stays usable as it
is. What a session's call means, and when it runs, is not known here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from greenlet import getcurrent

from polymux.diffusion.call import Phase
from polymux.diffusion.compiled_blocks import CompiledBlocks
from polymux.diffusion.precision import Weights
from polymux.diffusion.tuned import TunedLayers
from polymux.errors import ConfigError

Role = Literal["encoder", "denoiser", "decoder"]

# diffusers' component names are a standard of their own; a name that starts like this has this role. Modules with
# other names (connectors, adapters, safety checkers) work before or around the denoiser and count as encoders.
ROLES: tuple[tuple[str, Role], ...] = (
    ("transformer", "denoiser"),
    ("unet", "denoiser"),
    ("controlnet", "denoiser"),
    ("prior", "denoiser"),
    ("decoder", "denoiser"),  # of two-stage models (Cascade, unCLIP): a diffusion model itself
    ("vae", "decoder"),
    ("audio_vae", "decoder"),
    ("vqvae", "decoder"),
    ("vqgan", "decoder"),
    ("movq", "decoder"),
    ("vocoder", "decoder"),
)

CODER_METHODS = ("encode", "decode")
ENCODER_METHODS = ("forward", "get_text_features", "get_image_features", "get_image_tokens")
SUBMODULE_DEPTH = 3  # as deep as pipelines are known to reach: text_encoder.text_model.final_layer_norm

Paths = tuple[str, ...]
Handler = Callable[["Component", str, tuple[Any, ...], dict[str, Any]], Any]


class SessionGreenlet:
    """Marker base: the coroutine of a session carries the handler for its calls."""

    handler: Handler
    branch: str | None = None  # of guidance, that its pipeline computes now
    resets: int = 0  # times that its pipeline has said that what was remembered of its steps is over


@dataclass(frozen=True)
class Entry:
    """A function of a component that sessions may call, by way of attribute `name` of `owner`."""

    owner: torch.nn.Module
    name: str
    original: Callable[..., Any]
    signature: inspect.Signature
    own: Callable[..., Any] | None  # what the instance had before, in place of its class's


class Component:
    """One module of a pipeline. Its methods are named by their path: "forward", "decode", "model.forward"."""

    def __init__(self, name: str, module: torch.nn.Module, role: Role, looped: bool = False) -> None:
        """`looped`: what calls it is a loop of its own, each of whose calls follows from the one before."""
        self.name, self.module, self.role, self.looped = name, module, role, looped
        self.weights = Weights(module)
        self.tuned = TunedLayers(module)
        self.compiled: CompiledBlocks | None = None
        self.main = _main_methods(module, role)
        self.look_up()
        self.patch_area = _patch_area(module)

    def _paths(self) -> Iterator[tuple[str, torch.nn.Module]]:
        yield from ((method, self.module) for method in self.main)
        for path, child in _submodules(self.module, SUBMODULE_DEPTH):
            yield f"{path}.forward", child

    def phase(self, method: str) -> Phase:
        if self.role == "denoiser":
            return "denoise"
        return "decode" if self.role == "decoder" and method != "encode" else "encode"

    def bind(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, in the order of the signature; a None that is the default is left out."""
        signature = self.entries[method].signature
        bound = dict(signature.bind(*args, **kwargs).arguments)
        for name, parameter in signature.parameters.items():
            if name not in bound:
                continue
            if bound[name] is None and parameter.default is None:
                del bound[name]
            elif parameter.kind is parameter.VAR_KEYWORD:
                bound |= bound.pop(name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                bound["*"] = bound.pop(name)
        return bound

    def run(self, method: str, arguments: dict[str, Any]) -> Any:
        """Run the call, here and now."""
        entry = self.entries[method]
        parameters = entry.signature.parameters
        by_position = [n for n, p in parameters.items() if n in arguments and _needs_position(p, "*" in arguments)]
        rest = {k: v for k, v in arguments.items() if k not in by_position and k != "*"}
        return entry.original(*(arguments[n] for n in by_position), *arguments.get("*", ()), **rest)

    def look_up(self) -> None:
        """Find the functions that are to be captured; again, if somebody has put others in their place."""
        self.entries = {path: _entry(owner, path.rpartition(".")[2]) for path, owner in self._paths()}

    def attach(self) -> None:
        for path, entry in self.entries.items():
            entry.owner.__dict__[entry.name] = Interceptor(self, path, entry)

    def retune(self) -> None:
        """Layers of adapters have come or gone: they stand in the place of layers whose calls are captured."""
        self.detach()
        self.weights.relearn()
        self.tuned.refresh()
        self.look_up()
        self.attach()

    def detach(self) -> None:
        """Put back what was there. Once it is detached, a component does nothing more."""
        for entry in self.entries.values():
            if not isinstance(entry.owner.__dict__.get(entry.name), Interceptor):
                continue
            if entry.own is None:
                del entry.owner.__dict__[entry.name]
            else:
                entry.owner.__dict__[entry.name] = entry.own
        self.entries = {}


class Interceptor:
    """Takes the place of a component's function."""

    def __init__(self, component: Component, path: str, entry: Entry) -> None:
        self.component, self.path, self.original = component, path, entry.original
        # Libraries look at a forward's name and signature (transformers' generate does).
        self.__name__, self.__signature__ = entry.name, entry.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = getcurrent()
        if isinstance(current, SessionGreenlet):
            return current.handler(self.component, self.path, args, kwargs)
        return self.original(*args, **kwargs)


def _entry(owner: torch.nn.Module, name: str) -> Entry:
    original = getattr(owner, name)
    if isinstance(original, Interceptor):
        what = f"{original.component.name} ({type(owner).__name__}) already belongs to an engine"
        raise ConfigError(f"{what}: close that engine first, or load the model a second time")
    return Entry(owner, name, original, inspect.signature(original), owner.__dict__.get(name))


def _main_methods(module: torch.nn.Module, role: Role) -> tuple[str, ...]:
    wanted = {"decoder": CODER_METHODS, "encoder": ENCODER_METHODS, "denoiser": ()}[role]
    return tuple(m for m in wanted if callable(getattr(type(module), m, None))) or ("forward",)


def _submodules(module: torch.nn.Module, depth: int, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Named children down to `depth`; lists of blocks are not entered: only their owner runs them."""
    for name, child in module.named_children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            continue
        yield prefix + name, child
        if depth > 1:
            yield from _submodules(child, depth - 1, f"{prefix}{name}.")


def _needs_position(parameter: inspect.Parameter, has_rest: bool) -> bool:
    """Positional-only parameters, and all ordinary ones before a *args that is given."""
    return parameter.kind is parameter.POSITIONAL_ONLY or (
        has_rest and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    )


def _patch_area(module: torch.nn.Module) -> int:
    """Latent positions that become one token, from the module's own config."""
    config = getattr(module, "config", None)
    size = getattr(config, "patch_size", None)
    if size is None:  # some have a list of the sizes that they support
        size = next(iter(getattr(config, "all_patch_size", ())), 1)
    if isinstance(size, (list, tuple)) and all(isinstance(s, int) for s in size):
        return max(math.prod(size), 1)
    return size * size if isinstance(size, int) else 1


def components_of(
    parts: Iterable[tuple[str, object]], denoisers: tuple[str, ...] = (), loops: Sequence[tuple[str, Paths]] = ()
) -> list[Component]:
    """The components among a pipeline's parts. `denoisers` names further ones than the usual names tell; `loops` the
    modules inside those parts that sessions run themselves."""
    modules: dict[torch.nn.Module, str] = {}
    for name, part in parts:
        if isinstance(part, torch.nn.Module):
            modules.setdefault(part, name)  # one module may stand for several parts
    inside, made = dict(loops), list[Component]()
    for module, name in modules.items():
        role = "denoiser" if name in denoisers else role_of(name)
        if name in inside:
            paths = inside[name]
            made += [Component(f"{name}.{path}", module.get_submodule(path), role, looped=True) for path in paths]
        else:
            made.append(Component(name, module, role))
    return made


def role_of(name: str) -> Role:
    return next((role for prefix, role in ROLES if name.startswith(prefix)), "encoder")


def is_denoiser(name: str) -> bool:
    """By its name."""
    return role_of(name) == "denoiser"
