"""How the attention of a family's denoiser sees a video: frame after frame, each row by row, and text beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class VideoTokens:
    """Of one family.

    layers: a pattern for the whole path of each layer of attention over the video's tokens, in the denoiser.
    text: where the tokens of the text are in the same sequence.
    frames: the dimension of the denoiser's argument `hidden_states` that is frames; height and width are its last two.
        None: it is a sequence already, and the arguments num_frames, height and width say of what.
    """

    layers: str
    text: Literal["none", "before", "after"] = "none"
    frames: int | None = 2


WAN = VideoTokens(layers=r"blocks\.\d+\.attn1")
HUNYUAN_VIDEO = VideoTokens(layers=r"(single_)?transformer_blocks\.\d+\.attn", text="after")
COGVIDEOX = VideoTokens(layers=r"transformer_blocks\.\d+\.attn1", text="before", frames=1)
LTX_VIDEO = VideoTokens(layers=r"transformer_blocks\.\d+\.attn1", frames=None)
