"""What may be chosen for attention: names of backends, and which layers get which. Not what can run where."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from polymux.errors import ConfigError

BackendName = Literal[
    "TORCH_SDPA",
    "TORCH_SDPA_FLASH",
    "TORCH_SDPA_EFFICIENT",
    "TORCH_SDPA_MATH",
    "CUDNN_ATTN",
    "FLASH_ATTN",
    "FLASH_ATTN_HUB",
    "FLASH_ATTN_3_HUB",
    "SAGE_ATTN",
    "SAGE_ATTN_3",
    "FLASHINFER_ATTN",
    "TRTLLM_ATTN",
    "RAINFUSION_ATTN",
]
BACKENDS: tuple[str, ...] = get_args(BackendName)
Role = Literal["self", "cross"]


class BlockSparse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attention over a video that leaves out blocks of keys (docs/attention.md)."""

    sparsity: Annotated[float, Meta(ge=0, lt=1)] = 0.8  # the share of blocks that are left out
    start_step: Annotated[int, Meta(ge=0)] = 0  # steps before it leave out nothing
    skip_layers: tuple[Annotated[int, Meta(ge=0)], ...] = ()  # nor do these


class AttentionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a layer's attention runs on. `block_sparse`: `backend` computes what leaves out nothing."""

    backend: BackendName
    block_sparse: BlockSparse | None = None
    quant: dict[str, Any] | None = None
    skip_softmax: dict[str, Any] | None = None


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`per_role` goes before `default`; layers for which nothing is chosen run on diffusers' default."""

    default: AttentionSpec | None = None
    per_role: dict[Role, AttentionSpec] = {}

    @classmethod
    def of(cls, value: dict[str, Any] | None) -> AttentionConfig:
        """None: nothing is given. Raises ConfigError, which says where and what is allowed."""
        try:
            config = msgspec.convert(value or {}, cls, strict=True)
        except msgspec.ValidationError as error:
            allowed = f"backends are {', '.join(BACKENDS)}; roles are {', '.join(get_args(Role))}"
            raise ConfigError(
                f"diffusion_attention_config: {error}; {allowed}", param="diffusion_attention_config"
            ) from None
        for spec in filter(None, (config.default, *config.per_role.values())):
            _check_options(spec)
        cross = config.per_role.get("cross")
        if cross is not None and cross.block_sparse is not None:
            raise _refused("per_role: cross: block_sparse is for attention of a video to itself")
        return config

    @property
    def is_sparse(self) -> bool:
        return any(spec and spec.block_sparse for spec in (self.default, *self.per_role.values()))

    def for_role(self, role: Role | None) -> AttentionSpec | None:
        """For a layer of this role; None: of no known one."""
        return self.default if role is None else self.per_role.get(role, self.default)


# Options that kernels elsewhere have: by option, the backends that would.
ELSEWHERE = {"quant": "FLASHINFER_ATTN", "skip_softmax": "FLASHINFER_ATTN and TRTLLM_ATTN"}


def _check_options(spec: AttentionSpec) -> None:
    for option, backends in ELSEWHERE.items():
        if getattr(spec, option) is not None:
            raise _refused(f"{option}: {spec.backend} does not have it; {backends} would, which diffusers lacks")


def _refused(message: str) -> ConfigError:
    return ConfigError(f"diffusion_attention_config: {message}", param="diffusion_attention_config")
