"""What the routes of one server share: the generator behind it, the server's configuration, the media
loader, the names of the model.

Knows what a server needs of `AsyncOmni`, and no more; anything with these members can stand in for it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Protocol

from fastapi import Request

from polymux.config import EngineConfig, data_dir
from polymux.errors import InvalidRequestError, ModelNotFoundError
from polymux.media.source import MediaLoader
from polymux.metrics import Metrics
from polymux.omni import Streamed
from polymux.omni_output import OmniPreview, OmniRequestOutput
from polymux.orchestrator.orchestrator import Status
from polymux.prompts import Params, Prompt
from polymux.request import Capabilities, Modality, Progress
from polymux.server.adapter_files import AdapterFiles
from polymux.server.http_metrics import HttpMetrics
from polymux.server.image_store import ImageStore
from polymux.server.transcripts import Transcripts
from polymux.server.video_jobs import VideoJobs
from polymux.server.voice_store import Voices
from polymux.server_config import ServerConfig

WORDS: dict[Modality, str] = {"image": "pictures", "video": "video", "audio": "sound", "text": "text"}


class Generator(Protocol):
    """The part of `AsyncOmni` that the server uses."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def status(self) -> Status: ...

    @property
    def capabilities(self) -> Capabilities | None: ...

    @property
    def metrics(self) -> Metrics: ...

    async def health(self) -> None:
        """Raises NotReadyError unless a generation would work now."""
        ...

    async def sleep(self, level: int) -> int:
        """Give the device's memory back; the bytes. Raises PolymuxError."""
        ...

    async def wake_up(self) -> None:
        """Returns when a generation works again. Raises PolymuxError."""
        ...

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Raises PolymuxError."""
        ...

    async def stop_profile(self) -> list[str]:
        """The files of the traces. Raises PolymuxError."""
        ...

    def generate(
        self,
        prompt: Prompt,
        sampling_params: Params,
        *,
        request_id: str | None = None,
        partial_images: int = 0,
        session_id: str | None = None,
    ) -> AsyncGenerator[Progress | OmniPreview | OmniRequestOutput]:
        """Progress, up to `partial_images` previews of each picture, and then the output. Leaving early aborts the
        request. Raises PolymuxError."""
        ...

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params,
        *,
        request_id: str | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[Streamed]:
        """`generate` with large arrays in parts. Sent, or refused, before this returns. Raises PolymuxError."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request. Unknown ids are no error."""
        ...


class ServerState:
    """One per server."""

    def __init__(self, omni: Generator, config: ServerConfig) -> None:
        """Raises ConfigError for what only this machine can say, such as a folder that is not there."""
        self.omni = omni
        self.config = config
        self.media = MediaLoader(config.media)
        self.adapters = AdapterFiles(config.adapter_files)
        self.image_files = ImageStore(config.files)
        self.videos = VideoJobs(omni, config.video, data_dir(config, config.video.video_dir, "videos"))
        self.voices = Voices(config.voices, data_dir(config, config.voices.voice_store, "voices"))
        self.transcripts = Transcripts()
        self.http_metrics = HttpMetrics()
        self.created = int(time.time())

    async def aclose(self) -> None:
        """Gives back what the routes share. The generator belongs to whoever made it."""
        await self.videos.close()
        await self.media.aclose()
        self.voices.close()

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which clients may ask for the model; the first one is the one we tell them."""
        model = self.omni.config.model.model
        served = self.config.served_model_name
        return (served, model) if served and served != model else (model,)

    async def model(self) -> Capabilities:
        """What the model can do. Raises NotReadyError."""
        await self.omni.health()
        capabilities = self.omni.capabilities
        assert capabilities is not None  # they are known once the model was ready
        return capabilities

    async def model_of(self, modality: Modality) -> Capabilities:
        """What the model can do. Raises NotReadyError, and InvalidRequestError if it makes something else."""
        capabilities = await self.model()
        check_makes(capabilities, modality)
        return capabilities

    def note(self, request: Request, model: str | None, user: str | None) -> None:
        """Who asks, for the log, and of which model. Raises ModelNotFoundError unless it is the one that is served."""
        if user is not None:
            request.state.user = user
        self.check_model(model)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError unless `name` is missing or the model's."""
        if name is not None and name not in self.model_names:
            # Without the right name: that may be a folder of this machine.
            message = f"model={name[:80]!r} is not served here; GET /v1/models lists what is"
            raise ModelNotFoundError(message, param="model")


def check_makes(capabilities: Capabilities, modality: Modality) -> None:
    """Raises InvalidRequestError if the model makes something else."""
    if capabilities.modality != modality:
        raise InvalidRequestError(f"the model makes {capabilities.modality}, not {WORDS[modality]}", param="model")
