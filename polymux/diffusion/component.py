"""The components of a pipeline, and the capture of the calls that sessions make of them.

Capture replaces `forward` (for autoencoders `encode` and `decode`) on the instance. Outside a session the original
runs, so the pipeline stays usable as it is. What a session's call means, and when it runs, is not known here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from greenlet import getcurrent

from polymux.diffusion.call import Phase

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

# Entry points of text and vision encoders besides `forward`.
ENCODER_METHODS = ("get_text_features", "get_image_features", "get_image_tokens")

Handler = Callable[["Component", str, tuple[Any, ...], dict[str, Any]], Any]


class SessionGreenlet:
    """Marker base: the coroutine of a session carries the handler for its calls."""

    handler: Handler


class Component:
    """One module of a pipeline."""

    def __init__(self, name: str, module: torch.nn.Module, role: Role) -> None:
        self.name, self.module, self.role = name, module, role
        self.originals: dict[str, Callable[..., Any]] = {m: getattr(module, m) for m in _entry_points(module, role)}
        self.signatures = {m: inspect.signature(f) for m, f in self.originals.items()}
        self.patch_area = _patch_area(module)

    def phase(self, method: str) -> Phase:
        if self.role == "denoiser":
            return "denoise"
        return "decode" if self.role == "decoder" and method != "encode" else "encode"

    def bind(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, in the order of the signature; a None that is the default is left out."""
        signature = self.signatures[method]
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
        signature = self.signatures[method]
        positional = [
            arguments[n] for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_ONLY and n in arguments
        ]
        if "*" in arguments:  # everything before a *args must be passed by position
            before = [n for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
            positional += [arguments[n] for n in before if n in arguments] + list(arguments["*"])
            rest = {k: v for k, v in arguments.items() if k not in before and k != "*"}
            return self.originals[method](*positional, **rest)
        rest = {
            k: v
            for k, v in arguments.items()
            if k not in signature.parameters or signature.parameters[k].kind is not inspect.Parameter.POSITIONAL_ONLY
        }
        return self.originals[method](*positional, **rest)

    def attach(self) -> None:
        for method, original in self.originals.items():
            self.module.__dict__[method] = _interceptor(self, method, original)

    def detach(self) -> None:
        for method in self.originals:
            self.module.__dict__.pop(method, None)


def _interceptor(component: Component, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        current = getcurrent()
        if isinstance(current, SessionGreenlet):
            return current.handler(component, method, args, kwargs)
        return original(*args, **kwargs)

    # Libraries look at a forward's signature (transformers' generate does).
    call.__signature__ = component.signatures[method] if component.originals else None  # type: ignore[attr-defined]
    call.__name__ = method
    return call


def _entry_points(module: torch.nn.Module, role: Role) -> tuple[str, ...]:
    def has(name: str) -> bool:
        return callable(getattr(type(module), name, None))

    if role == "decoder":
        coder = tuple(m for m in ("encode", "decode") if has(m))
        return coder or ("forward",)
    if role == "encoder":
        return ("forward", *(m for m in ENCODER_METHODS if has(m)))
    return ("forward",)


def _patch_area(module: torch.nn.Module) -> int:
    """Latent positions that become one token, from the module's own config."""
    size = getattr(getattr(module, "config", None), "patch_size", None)
    if isinstance(size, int):
        return size * size
    if isinstance(size, (list, tuple)) and all(isinstance(s, int) for s in size):
        area = 1
        for s in size:
            area *= s
        return max(area, 1)
    return 1


def components_of(parts: Iterable[tuple[str, object]], denoisers: tuple[str, ...] = ()) -> list[Component]:
    """The components among a pipeline's parts. `denoisers` names further ones than the usual names tell."""
    found = []
    for name, part in parts:
        if not isinstance(part, torch.nn.Module):
            continue
        role: Role = "encoder"
        if name in denoisers:
            role = "denoiser"
        else:
            role = next((role for prefix, role in ROLES if name.startswith(prefix)), "encoder")
        found.append(Component(name, part, role))
    return found
