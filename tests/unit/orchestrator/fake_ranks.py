"""A stage process of several ranks whose engines compute nothing. Started as `python fake_ranks.py --fd N`; no torch.

Prompts, beside those of `fake_stage`: "raise on R" (rank R's step raises), "note FOLDER" (each rank writes a file
there, named by its number, with the request's seed). Model "restless on R": rank R refuses to sleep.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from fake_stage import FakeEngine

from polymux.config import EngineConfig
from polymux.engine import follower, process, rank_link
from polymux.engine.base import StageEngine
from polymux.engine.executor import Executor
from polymux.engine.followers import Followers, GiveUp, start_ranks
from polymux.errors import ConfigError
from polymux.request import Request

rank_link.BEAT_S = 0.1
FOLLOW = "--follow"


class RankEngine(FakeEngine):
    """Of one rank."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        super().__init__(config)
        self.rank, self.asleep = rank, 0

    @property
    def working(self) -> bool:
        return bool(self.requests)

    def warm_up(self, through: StageEngine | None = None) -> None:
        super().warm_up()

    def forget_warm_up(self) -> None:
        return None

    def sleep(self, level: int) -> int:
        if self.model == f"restless on {self.rank}":
            raise ConfigError("its weights cannot be moved")
        self.asleep = level
        return super().sleep(level)

    def wake_up(self) -> None:
        self.asleep = 0
        super().wake_up()

    def _advance(self, request: Request) -> None:
        prompt = request.prompt or ""
        if prompt == f"raise on {self.rank}":
            raise RuntimeError("device-side assert")
        if prompt.startswith("note "):
            Path(prompt.removeprefix("note "), str(self.rank)).write_text(str(request.params.seed))
        super()._advance(request)


def ranks(config: EngineConfig, give_up: GiveUp) -> Executor:
    followers = Followers(config, start_ranks(config, (sys.executable, "-P", __file__, FOLLOW)), give_up)
    followers.wait_until_up()
    return Executor(RankEngine(config, 0), SimpleNamespace(telling=False), followers)


if __name__ == "__main__":
    if FOLLOW in sys.argv:
        sys.exit(
            follower.main(sys.argv[2:], lambda config, rank, link: follower.Follower(link, RankEngine(config, rank)))
        )
    sys.exit(process.main(make_ranks=ranks))
