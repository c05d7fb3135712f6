"""The clients of bench/soak.py: every kind of request, and a ledger of what became of each."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
from PIL import Image

URL = "/v1/images/generations"
MODEL = "soak"
KINDS = {"plain": 8, "several": 2, "stream": 3, "slow": 1, "bad": 3, "huge_picture": 1, "huge_body": 1, "leaver": 5}
BAD: tuple[dict[str, Any], ...] = (
    {"size": "63x64"},
    {"n": 0},
    {"seed": -1},
    {"num_inference_steps": "4"},
    {"guidance_scale": 1e400},
    {"unknown": 1},
)
MAX_BODY = 1_000_000  # bytes, of the server
BACK_OFF_S = 0.3  # after 429 and 503


@dataclass
class Ledger:
    """What was sent and what came back, as the clients saw it."""

    sent: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)  # by status and code
    left: int = 0  # requests whose client left without looking at the answer
    wrong: list[str] = field(default_factory=list)  # what must never be
    latencies: list[float] = field(default_factory=list)
    pictures: dict[str, Any] = field(default_factory=dict)  # the first one of each request that is the same

    def check_picture(self, body: dict[str, Any], index: int, data: str) -> None:
        """The same request has the same picture, up to the rounding of merged calls; else somebody got another's."""
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).astype(int)
        key = f"{body['seed'] + index} {body['num_inference_steps']}"
        first = self.pictures.setdefault(key, pixels)
        if first.shape != pixels.shape or np.abs(first - pixels).max() > 2:
            self.wrong.append(f"another picture for seed and steps {key}")


class Clients:
    """Sends requests, one after the other in each of `count` tasks, until told to stop."""

    def __init__(self, base_url: str, seed: int) -> None:
        self.ledger = Ledger()
        self._chance = random.Random(seed)
        self._address = urlsplit(base_url)
        self._http = httpx2.AsyncClient(base_url=base_url, timeout=120, limits=httpx2.Limits(max_connections=None))
        self._stop = False

    async def run(self, count: int) -> None:
        await asyncio.gather(*(self._loop() for _ in range(count)))
        await self._http.aclose()

    def stop(self) -> None:
        self._stop = True

    async def _loop(self) -> None:
        while not self._stop:
            kind = self._chance.choices(list(KINDS), list(KINDS.values()))[0]
            self.ledger.kinds[kind] += 1
            self.ledger.sent += 1
            try:
                await self._one(kind)
            except (httpx2.HTTPError, OSError) as error:
                self.ledger.wrong.append(f"{kind}: no answer: {type(error).__name__}: {error}")
            except (KeyError, ValueError) as error:
                self.ledger.wrong.append(f"{kind}: an answer that is none: {type(error).__name__}: {error}")

    def _body(self) -> dict[str, Any]:
        """Few different ones, so that each comes again in other company."""
        steps, seed = self._chance.choice((2, 3, 5)), self._chance.randrange(6)
        return {"model": MODEL, "prompt": "a red square", "size": "64x64", "num_inference_steps": steps, "seed": seed}

    async def _one(self, kind: str) -> None:
        body = self._body()
        match kind:
            case "several":
                body["n"] = 3
            case "slow":
                body["num_inference_steps"] = 40
            case "bad":
                body |= self._chance.choice(BAD)
            case "huge_picture":
                body["size"] = "65536x65536"
            case "huge_body":
                body["prompt"] = "a" * (2 * MAX_BODY)
        if kind == "leaver":
            await self._leave(body | {"num_inference_steps": self._chance.choice((2, 2000))})
        elif kind == "stream":
            await self._stream(body)
        else:
            await self._plain(body, kind)

    async def _plain(self, body: dict[str, Any], kind: str) -> None:
        start = time.perf_counter()
        request_id = f"soak-{self.ledger.sent}"
        headers = {"content-type": "application/json", "x-request-id": request_id}
        response = await self._http.post(URL, content=json.dumps(body), headers=headers)
        if response.headers.get("x-request-id") != request_id:
            self.ledger.wrong.append("an answer with another request's id")
        await self._note(response)
        expected = {"bad": {400}, "huge_picture": {400}, "huge_body": {413}}.get(kind, {200, 429, 503})
        if response.status_code not in expected | {503}:
            self.ledger.wrong.append(f"{kind}: {response.status_code} {response.text[:100]}")
        if response.status_code == 200:
            self.ledger.latencies.append(time.perf_counter() - start)
            data = response.json()["data"]
            if len(data) != body.get("n", 1):
                self.ledger.wrong.append(f"{len(data)} pictures, not {body.get('n', 1)}")
            for index, picture in enumerate(data):
                self.ledger.check_picture(body, index, picture["b64_json"])

    async def _stream(self, body: dict[str, Any]) -> None:
        async with self._http.stream("POST", URL, json=body | {"stream": True, "partial_images": 1}) as response:
            if response.status_code != 200:
                await response.aread()
                await self._note(response)
                return
            ends = []
            async for event in httpx2.EventSource(response):
                content = json.loads(event.data)
                if content["type"] == "image_generation.completed":
                    self.ledger.check_picture(body, 0, content["b64_json"])
                    ends.append("200")
                elif content["type"] == "error":
                    ends.append(f"stream {content['error']['code']}")
        if len(ends) != 1:
            self.ledger.wrong.append(f"a stream with {len(ends)} ends: {ends}")
        self.ledger.answers.update(ends[:1])

    async def _leave(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        _, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        lines = (f"POST {URL} HTTP/1.1", f"Host: {self._address.netloc}", "Content-Type: application/json")
        writer.write("\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content)
        await writer.drain()
        await asyncio.sleep(self._chance.uniform(0.0, 0.4))
        writer.close()
        self.ledger.left += 1

    async def _note(self, response: httpx2.Response) -> None:
        code = "" if response.status_code == 200 else f" {response.json()['error']['code']}"
        self.ledger.answers[f"{response.status_code}{code}"] += 1
        if response.status_code in (429, 503):
            await asyncio.sleep(BACK_OFF_S)
