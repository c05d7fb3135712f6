"""Where the time of a request went, in its answer: `polymux.profile` as the server's schema shows it."""

from __future__ import annotations

import msgspec
from pydantic import BaseModel, Field

from polymux.profile import Profile


class ComponentSeconds(BaseModel):
    component: str
    phase: str = Field(description="encode, denoise or decode")
    runs: int = Field(description="that answered calls of the request")
    seconds: float = Field(description="of these runs")
    share: float = Field(description="of each run the part that the request's calls were of all that it answered")


class StepSeconds(BaseModel):
    step: int = Field(description="from 0")
    runs: int
    calls: int = Field(description="of all requests, that the largest of these runs answered")
    seconds: float
    share: float


class RequestProfile(BaseModel):
    total: float = Field(description="seconds from the request's arrival at the model to its end")
    queue: float = Field(description="until it began")
    computing: float = Field(description="runs of components that answered its calls, each once")
    pipeline: float = Field(description="the pipeline's own code; on a GPU, some of it beside runs")
    other: float = Field(description="what is left: runs of other requests alone, and the way out")
    components: list[ComponentSeconds]
    steps: list[StepSeconds] = Field(description="of the denoisers")

    @classmethod
    def of(cls, profile: Profile) -> RequestProfile:
        return cls.model_validate(msgspec.to_builtins(profile))


def profile_header(profile: Profile | None) -> dict[str, str]:
    """Of an answer that is a file: without the steps, of which there may be too many for a header."""
    if profile is None:
        return {}
    return {"x-profile": RequestProfile.of(profile).model_dump_json(exclude={"steps"})}
