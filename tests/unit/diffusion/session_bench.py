"""Modules under capture and sessions over them, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from polymux.diffusion.call import Call
from polymux.diffusion.component import Component
from polymux.diffusion.merging import Merger
from polymux.diffusion.own_copy import own_copy
from polymux.diffusion.runner import Runner
from polymux.diffusion.session import ResultSpecs, Session, SessionSettings

CPU = torch.device("cpu")


class Double(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.ran_in: list[greenlet] = []
        self.watch: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran_in.append(getcurrent())
        self.watch()
        return 2 * x


class Coder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return x / x


class Bench:
    """Modules under capture, and sessions over them."""

    def __init__(self) -> None:
        self.modules = SimpleNamespace(transformer=Double(), vae=Coder(), text_encoder=Double())
        roles: Any = {"transformer": "denoiser", "vae": "decoder", "text_encoder": "encoder"}
        self.components = [Component(name, module, roles[name]) for name, module in vars(self.modules).items()]
        self.specs = ResultSpecs()
        self.runner = Runner(Merger(), CPU)
        for component in self.components:
            component.attach()

    def session(self, body: Callable[[Any], Any], seed: int = 0, collect: bool = True) -> Session:
        session = Session("a", 0, seed, SessionSettings(CPU, self.specs, collect, self.components))
        session.open(self.modules, body, own_copy)
        return session

    def turn(self, *sessions: Session) -> list[Call]:
        """Let the sessions go on until they wait, and run what they wait for, call by call."""
        calls = []
        for session in sessions:
            while session.ready:
                session.resume()
                calls += session.take_calls()
        for call in calls:
            self.runner.execute([call])
        return calls

    def close(self) -> None:
        for component in self.components:
            component.detach()

    def finish(self, *sessions: Session) -> None:
        while not all(session.finished for session in sessions):
            self.turn(*sessions)


def ones() -> torch.Tensor:
    return torch.ones(1, 2)
