"""What the answer to a request is held to while it is written, for whichever engine writes it.

Grammars are for one tokenizer, and made when the first request asks for one. For the thread that prepares requests.
Knows what a request asks for; not how a constraint is kept.
"""

from __future__ import annotations

from dataclasses import replace

from polymux.engine.constraint import Grammars
from polymux.families.chat import ChatAdapter, ChatCall
from polymux.families.generate import Parts
from polymux.request import Request, SamplingParams
from polymux.tools import CallFormat


class Holding:
    """Of one engine."""

    def __init__(self, adapter: ChatAdapter, format: CallFormat | None) -> None:
        """`format`: how the model writes calls of tools; None: it takes none."""
        self._adapter, self._format = adapter, format
        self._grammars: Grammars | None = None

    def held(self, parts: Parts, request: Request, params: SamplingParams, call: ChatCall) -> ChatCall:
        """A call with what its answer must fit. Raises InvalidRequestError if no grammar can be made of that."""
        use, schema = request.tools, params.json_schema
        if schema is None and (use is None or not use.constrains):
            return call
        if self._grammars is None:
            vocabulary = parts.model.config.get_text_config().vocab_size
            self._grammars = Grammars(self._adapter.tokenizer(parts), vocabulary, self._format or "hermes")
        if use is not None:
            return replace(call, constraint=self._grammars.calls(use, call.ends, schema))
        return replace(call, constraint=self._grammars.json(schema or {}, call.ends))
