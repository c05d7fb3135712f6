"""One generation on behalf of one connection: it ends when the client leaves.

Knows neither what is generated nor how the answer looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid

from fastapi import Request

from polymux.errors import GenerationError, RequestAbortedError
from polymux.omni_output import OmniRequestOutput
from polymux.prompts import Prompt
from polymux.request import OmniDiffusionSamplingParams
from polymux.server.state import Generator


async def generate(
    omni: Generator, request: Request, prompt: Prompt, params: OmniDiffusionSamplingParams
) -> OmniRequestOutput:
    """The output. Raises what the generator raises, and RequestAbortedError if the client left before it was done."""
    # Clients may send the same x-request-id twice at once; the engine's ids are unique.
    engine_id = f"{request.state.request_id}-{uuid.uuid4().hex[:8]}"
    work = asyncio.create_task(_output(omni, prompt, params, engine_id))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise RequestAbortedError("the client left")
    finally:
        work.cancel()  # ends the generator, and that aborts the request in the engine
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _output(
    omni: Generator, prompt: Prompt, params: OmniDiffusionSamplingParams, engine_id: str
) -> OmniRequestOutput:
    async with contextlib.aclosing(omni.generate(prompt, params, request_id=engine_id)) as events:
        async for event in events:
            if isinstance(event, OmniRequestOutput):
                return event
    raise GenerationError("the generation ended without an output")


async def _disconnected(request: Request) -> None:
    """Returns when the client is gone. The body was read before, so nothing else can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
