"""What may be chosen for attention: names of backends, and which layers get which. Not what can run where."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

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


class AttentionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a layer's attention runs on."""

    backend: BackendName


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`per_role` goes before `default`; layers for which nothing is chosen run on diffusers' default."""

    default: AttentionSpec | None = None
    per_role: dict[Role, AttentionSpec] = {}

    @classmethod
    def of(cls, value: dict[str, Any]) -> AttentionConfig:
        """Raises ConfigError, which says where and what is allowed."""
        try:
            return msgspec.convert(value, cls, strict=True)
        except msgspec.ValidationError as error:
            allowed = f"backends are {', '.join(BACKENDS)}; roles are {', '.join(get_args(Role))}"
            raise ConfigError(
                f"diffusion_attention_config: {error}; {allowed}", param="diffusion_attention_config"
            ) from None

    def for_role(self, role: Role | None) -> AttentionSpec | None:
        """For a layer of this role; None: of no known one."""
        return self.default if role is None else self.per_role.get(role, self.default)
