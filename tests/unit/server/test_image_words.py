"""What is wrong with a size is told once, in the client's words."""

from __future__ import annotations

import pytest

from polymux.errors import InvalidRequestError
from polymux.server.image_request import Words
from polymux.server.protocol import ImageGenerationRequest


@pytest.mark.parametrize(
    ("size", "said"),
    [(None, "size, left out: too large"), ("auto", "size='auto': too large"), ("8x8", "size='8x8': too large")],
)
def test_the_size_is_named_once(size: str | None, said: str) -> None:
    words = Words(ImageGenerationRequest.model_validate({"prompt": "x", "size": size}), {})
    for message in ("size: too large", "too large"):
        assert words.of(InvalidRequestError(message, param="size")).message == said
