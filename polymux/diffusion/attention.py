"""Puts the attention of denoisers on the backend that was chosen, through diffusers' dispatcher.

Each attention layer has a processor that tells the dispatcher its backend; it is set there and nowhere else, since
diffusers' active backend is one for the whole process. A choice that cannot run here is refused with what is missing:
the package, the device, its capability, the type of the weights, or a model whose attention takes another way. Whether
a backend takes the masks of a model is seen in the warm-up.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import __version__ as diffusers_version
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _check_attention_backend_requirements,
    _maybe_download_kernel_for_backend,
    dispatch_attention_fn,
)

from polymux.attention import AttentionConfig, AttentionSpec, Role
from polymux.diffusion import block_sparse
from polymux.diffusion.call import Call
from polymux.diffusion.component import Component
from polymux.diffusion.sparse_layers import SparseLayers
from polymux.errors import ConfigError
from polymux.families.base import Family

log = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Kernel:
    """A backend of the dispatcher. `capability`: it needs a CUDA device that has at least this, and half precision."""

    name: str
    capability: tuple[int, int] | None = None


KERNELS: dict[str, tuple[Kernel, ...]] = {  # by our names; the first that can run is taken
    "TORCH_SDPA": (Kernel("native"),),
    "TORCH_SDPA_FLASH": (Kernel("_native_flash"),),
    "TORCH_SDPA_EFFICIENT": (Kernel("_native_efficient"),),
    "TORCH_SDPA_MATH": (Kernel("_native_math"),),
    "CUDNN_ATTN": (Kernel("_native_cudnn", (8, 0)),),
    "FLASH_ATTN": (Kernel("_flash_3", (9, 0)), Kernel("flash", (8, 0))),
    "FLASH_ATTN_HUB": (Kernel("flash_hub", (8, 0)),),
    "FLASH_ATTN_3_HUB": (Kernel("_flash_3_hub", (9, 0)),),
    "SAGE_ATTN": (Kernel("sage", (8, 0)),),
    "SAGE_ATTN_3": (Kernel("sage_blackwell_hub", (10, 0)),),
    "FLASHINFER_ATTN": (),
    "TRTLLM_ATTN": (),
    "RAINFUSION_ATTN": (),
}


class AttentionChoice:
    """What was set, until `undo`."""

    def __init__(self) -> None:
        self._sparse: dict[str, SparseLayers] = {}  # by component
        self._before: list[tuple[Any, Any]] = []

    def set(self, processor: Any, kernel: str) -> None:
        if any(known is processor and known._attention_backend != kernel for known, _ in self._before):
            raise _refusal(
                "per_role: layers of this model share what computes their attention; choose a default for all"
            )
        self._before.append((processor, processor._attention_backend))
        processor._attention_backend = AttentionBackendName(kernel)

    def leave_out(self, component: Component, spec: AttentionSpec, family: Family, device: torch.device) -> None:
        """Make its attention over videos block-sparse. Raises ConfigError."""
        assert spec.block_sparse is not None
        if family.video_tokens is None:
            raise _sparse_refusal(f"for {family.name} it is not declared where the tokens of a video are")
        missing = block_sparse.problem(device, component.weights.probe_dtype or torch.float32)
        if missing is not None:
            raise _sparse_refusal(f"it cannot run here: {missing}")
        self._sparse[component.name] = SparseLayers(component.module, family.video_tokens, spec.block_sparse)

    def __contains__(self, name: str) -> bool:
        """Whether the component of this name leaves something out in some steps, so that its calls are not merged."""
        return name in self._sparse

    @contextmanager
    def active(self, call: Call) -> Iterator[None]:
        """Around a run of `call`."""
        sparse = self._sparse.get(call.component.name)
        with nullcontext() if sparse is None else sparse.active(call):
            yield

    def sparse_layers(self, component: Component) -> str:
        """For people; empty if there are none."""
        if (sparse := self._sparse.get(component.name)) is None:
            return ""
        settings = sparse.settings
        where = f"{len(sparse.layers)} of {sparse.total} layers over the video, from step {settings.start_step}"
        return f"; block-sparse ({settings.sparsity:g}) on {where}; its calls are not merged"

    def undo(self) -> None:
        """The layers as they were: whoever has the pipeline next chooses anew."""
        while self._sparse:
            self._sparse.popitem()[1].undo()
        while self._before:
            processor, backend = self._before.pop()
            processor._attention_backend = backend


def choose_attention(
    config: AttentionConfig, source: str, components: Sequence[Component], device: torch.device, family: Family
) -> AttentionChoice:
    """Put the denoisers' layers on what `config` says, and log what runs on what. `source`: who says it.

    Raises ConfigError, with everything as it was.
    """
    denoisers = [c for c in components if c.role == "denoiser"]
    choice = AttentionChoice()
    if config.default is None and not config.per_role:
        for component in denoisers:
            log.info("attention: %s: %s", component.name, _default(component))
        return choice
    try:
        counts = [_set(choice, config, component, device) for component in denoisers]
        of_video = config.for_role("self")
        if of_video is not None and of_video.block_sparse is not None:
            for component in denoisers:
                choice.leave_out(component, of_video, family, device)
        if not any(counts) and not _is_all_that_was_chosen(config):
            kinds = ", ".join(type(c.module).__name__ for c in denoisers) or "this model"
            raise _refusal(f"{source}: the attention of {kinds} does not go through diffusers' dispatcher")
        _check_roles_met(config, source, denoisers)
    except ConfigError:
        choice.undo()
        raise
    for component, count in zip(denoisers, counts, strict=True):
        log.info(
            "attention: %s: %s (%s)",
            component.name,
            _described(component, count) + choice.sparse_layers(component),
            source,
        )
    return choice


def _is_all_that_was_chosen(config: AttentionConfig) -> bool:
    """Whether layers that take another way to torch's attention than diffusers' dispatcher get what was chosen."""
    default = config.default
    if default is None or default.block_sparse is None or config.per_role:
        return False
    return default.backend == "TORCH_SDPA"


def _described(component: Component, chosen: Counter[str]) -> str:
    """How many layers run on what, none left out."""
    total, dispatching = len(list(_layers(component.module))), len(list(filter(_dispatches, _layers(component.module))))
    counts = chosen + Counter({"diffusers' default": dispatching - chosen.total()})
    counts += Counter({"kernels of their own": total - dispatching})
    return ", ".join(f"{number} of {total} layers on {what}" for what, number in counts.items())


def _set(choice: AttentionChoice, config: AttentionConfig, component: Component, device: torch.device) -> Counter[str]:
    """The layers of one component; how many have got which kernel."""
    dtype, found = component.weights.probe_dtype or torch.float32, dict[str, str]()
    counts: Counter[str] = Counter()
    for layer in filter(_dispatches, _layers(component.module)):
        spec = config.for_role(_role(layer) if config.per_role else None)
        if spec is None:
            continue
        if spec.backend not in found:
            found[spec.backend] = find_kernel(spec.backend, device, dtype)
        choice.set(layer.processor, found[spec.backend])
        counts[found[spec.backend]] += 1
    return counts


def _layers(module: torch.nn.Module) -> Iterator[Any]:
    """In diffusers, what computes the attention of a layer is its processor, whatever class the layer is of."""
    return (layer for layer in module.modules() if getattr(layer, "processor", None) is not None)


def goes_through_dispatcher(module: torch.nn.Module) -> bool:
    """Whether a backend can be chosen for any of a denoiser's attention layers."""
    return any(map(_dispatches, _layers(module)))


def _dispatches(layer: Any) -> bool:
    return hasattr(layer.processor, "_attention_backend")


def _role(layer: Any) -> Role:
    """As the layer itself says; raises ConfigError if it does not."""
    crosses = getattr(layer, "is_cross_attention", None)
    if not isinstance(crosses, bool):
        kind = type(layer).__name__
        raise _refusal(f"per_role: layers of {kind} do not tell self- from cross-attention; choose a default for all")
    return "cross" if crosses else "self"


def _check_roles_met(config: AttentionConfig, source: str, denoisers: Sequence[Component]) -> None:
    if config.per_role:
        there = {_role(layer) for component in denoisers for layer in filter(_dispatches, _layers(component.module))}
        for role in config.per_role:
            if role not in there:
                raise _refusal(f"{source}: per_role: this model has no {role}-attention")


def _default(component: Component) -> str:
    if not goes_through_dispatcher(component.module):
        return "its own, which does not go through diffusers' dispatcher"
    active, _ = _AttentionBackendRegistry.get_active_backend()
    return f"{AttentionBackendName(active).value}, diffusers' default; no other was chosen"


def find_kernel(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """diffusers' name of the first kernel of this backend that runs here. Raises ConfigError with what is missing."""
    reasons = []
    for kernel in KERNELS[backend]:
        problems = list(_problems(kernel, device, dtype))
        if not problems:
            return kernel.name
        reasons.append(f"{kernel.name}: {', and '.join(problems)}")
    if not reasons:
        reasons.append(f"diffusers {diffusers_version} has no such attention")
    raise _refusal(f"attention backend {backend} cannot run here: {'; '.join(reasons)}")


def _problems(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    if kernel.name not in {member.value for member in AttentionBackendName}:
        yield f"diffusers {diffusers_version} does not have it"
        return
    member = AttentionBackendName(kernel.name)
    missing = [_failure(lambda: _check_attention_backend_requirements(member))]
    if kernel.capability is not None:
        missing += [_of_device(kernel.capability, device)]
        missing += [
            None if dtype in HALF else f"it needs bf16 or fp16, and the weights are {dtype}".replace("torch.", "")
        ]
    if not any(missing):
        missing = [_failure(lambda: _try(member, device, dtype))]
    yield from filter(None, missing)


def _of_device(capability: tuple[int, int], device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is {device.type}"
    there = torch.cuda.get_device_capability(device)
    if there < capability:
        needed, has = (".".join(map(str, pair)) for pair in (capability, there))
        return f"it needs compute capability {needed}, and this GPU has {has}"
    return None


def _failure(action: Callable[[], object]) -> str | None:
    """What an attempt failed with; kernels may raise anything."""
    try:
        action()
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _try(member: AttentionBackendName, device: torch.device, dtype: torch.dtype) -> None:
    """Run it once: of 16 tokens and two heads of 64."""
    _maybe_download_kernel_for_backend(member)
    with torch.no_grad():
        tokens = torch.zeros(1, 16, 2, 64, device=device, dtype=dtype)
        dispatch_attention_fn(tokens, tokens, tokens, backend=member)


def _refusal(message: str) -> ConfigError:
    return ConfigError(message, param="diffusion_attention_backend")


def _sparse_refusal(message: str) -> ConfigError:
    return ConfigError(f"block_sparse: {message}", param="diffusion_attention_config")
