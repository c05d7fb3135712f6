"""A request for pictures that are written token by token: prepared in a thread, each picture made by a session."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from polymux.engine.chat_job import PreparedJob
from polymux.families.pictures import PictureCall
from polymux.request import Finished, Modality, Progress


@dataclass(kw_only=True, eq=False)
class PictureJob(PreparedJob):
    """Output i is the picture of seed + i. Pictures are small enough for one message."""

    preparing: Future[PictureCall]
    call: PictureCall | None = None

    @property
    def hungry(self) -> bool:
        return self.call is not None and super().hungry

    def progress(self) -> Progress | None:
        """Nothing until it is certain that the model takes the request."""
        return None if self.call is None else super().progress()

    def finished(self, modality: Modality, fps: float | None, sample_rate: int | None) -> Finished:
        return super().finished("image", None, None)
