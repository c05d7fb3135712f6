"""What is known of a family's checkpoints for caches of denoising steps (docs/step_cache.md).

Polynomials and ratios are published measurements on the checkpoints that they are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Polynomial = tuple[float, ...]  # from the highest power down


@dataclass(frozen=True, kw_only=True)
class StepCaches:
    """Of one family.

    backends: those that have run with it, as tests/parity/test_step_caches.py does. Others are refused.
    mag_ratios: the constant of diffusers' module for MagCache that holds those of its checkpoints.
    indicator: what TeaCache looks at: the embedding of the timestep that blocks get, or the first block's normed input.
    coefficients: TeaCache's polynomials, each with the (key, value) of the denoiser's config that tells which
        checkpoints it is for; the first that holds counts, and the key "" holds always.
    """

    backends: tuple[str, ...]
    mag_ratios: str | None = None
    indicator: Literal["temb", "norm1"] = "temb"
    coefficients: tuple[tuple[tuple[str, object], Polynomial], ...] = ()


NOT_VALIDATED = StepCaches(backends=())
ALL = ("first_block", "mag_cache", "tea_cache", "taylorseer", "pab", "cache_dit")
ANY = ("", None)  # checkpoint

WITHOUT_MEASUREMENTS = StepCaches(backends=ALL)
# Where diffusers does not know what the blocks return, or cannot mix it, none can keep what all of them add.
NOT_BY_DIFFUSERS = StepCaches(backends=("taylorseer", "pab", "cache_dit"))
LAYERS_ALONE = StepCaches(backends=("taylorseer", "pab"))  # nor does cache-dit
BY_DIFFUSERS = StepCaches(backends=tuple(name for name in ALL if name != "cache_dit"))

FLUX = StepCaches(
    backends=ALL,
    mag_ratios="FLUX_MAG_RATIOS",
    indicator="norm1",
    coefficients=((ANY, (4.98651651e02, -2.83781631e02, 5.58554382e01, -3.82021401e00, 2.64230861e-01)),),
)
HUNYUAN_VIDEO = StepCaches(
    backends=ALL,
    indicator="norm1",
    coefficients=((ANY, (7.33226126e02, -4.01131952e02, 6.75869174e01, -3.14987800e00, 9.61237896e-02)),),
)
MOCHI = StepCaches(
    backends=ALL,
    indicator="norm1",
    coefficients=((ANY, (-3.51241319e03, 8.11675948e02, -6.09400215e01, 2.42429681e00, 3.05291719e-03)),),
)
COGVIDEOX = StepCaches(
    backends=ALL,
    coefficients=(
        # 1.5, 5 B
        (("patch_size_t", 2), (2.50210439e02, -1.65061612e02, 3.57804877e01, -7.81551492e-01, 3.58559703e-02)),
        # 5 B
        (
            ("use_rotary_positional_embeddings", True),
            (-1.53880483e03, 8.43202495e02, -1.34363087e02, 7.97131516e00, -5.23162339e-02),
        ),
        # 2 B
        (ANY, (-3.10658903e01, 2.54732368e01, -5.92380459e00, 1.75769064e00, -3.61568434e-03)),
    ),
)
WAN = StepCaches(  # 2.1 with 1.3 B; the configs of 2.1 and 2.2 with 14 B are the same, and nothing is known of 2.2
    backends=ALL,
    coefficients=(
        (
            ("num_attention_heads", 12),
            (-5.21862437e04, 9.23041404e03, -5.28275948e02, 1.36987616e01, -4.99875664e-02),
        ),
    ),
)
