"""polymux: generative models of image, video and audio, served from their checkpoints as they are."""

from typing import TYPE_CHECKING, Any

from polymux.attention import AttentionConfig, AttentionSpec, BlockSparse
from polymux.errors import PolymuxError
from polymux.parallel_config import DiffusionParallelConfig
from polymux.request import (
    LoRARequest,
    OmniDiffusionSamplingParams,
    OutputChunk,
    Progress,
    SamplingParams,
    SoundPiece,
    TextPiece,
)
from polymux.version import VERSION as __version__

if TYPE_CHECKING:
    from polymux.omni import AsyncOmni as AsyncOmni
    from polymux.omni import Omni as Omni
    from polymux.omni_output import OmniPreview as OmniPreview
    from polymux.omni_output import OmniRequestOutput as OmniRequestOutput

__all__ = [
    "AsyncOmni",
    "AttentionConfig",
    "AttentionSpec",
    "BlockSparse",
    "DiffusionParallelConfig",
    "LoRARequest",
    "Omni",
    "OmniDiffusionSamplingParams",
    "OmniPreview",
    "OmniRequestOutput",
    "OutputChunk",
    "PolymuxError",
    "Progress",
    "SamplingParams",
    "SoundPiece",
    "TextPiece",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """The names that only the API process needs; a stage process imports this package too, and not those."""
    if name in ("AsyncOmni", "Omni"):
        from polymux import omni

        return omni.AsyncOmni if name == "AsyncOmni" else omni.Omni
    if name in ("OmniPreview", "OmniRequestOutput"):
        from polymux import omni_output

        return omni_output.OmniPreview if name == "OmniPreview" else omni_output.OmniRequestOutput
    raise AttributeError(f"module 'polymux' has no attribute {name!r}")
