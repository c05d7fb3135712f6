"""polymux: generative models of text, image, video and audio, served from their checkpoints as they are."""

from polymux.version import VERSION as __version__

__all__ = ["__version__"]
