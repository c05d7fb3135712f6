"""Casts of weights are a session's own, and weights go back to exactly what was loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_pipeline import FakePipeline, Vae, engine_of, outcome, pipeline_of, pixels, request_of, solo
from session_bench import Bench

from polymux.diffusion.precision import Weights


class Mixed(torch.nn.Module):
    """Half precision but for its norm, with a buffer and with whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(2)
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2).half())
        self.register_buffer("mean", torch.rand(2).half())
        self.register_buffer("index", torch.arange(2))


def types(module: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in (*module.named_parameters(), *module.named_buffers())}


@pytest.mark.parametrize("by_pipeline", [True, False])
def test_weights_go_back_to_what_was_loaded(by_pipeline: bool) -> None:
    module = Mixed()
    before, values = types(module), {name: t.clone() for name, t in module.state_dict().items()}
    weights = Weights(module)
    assert weights.cast_to is None
    if by_pipeline:
        module.to(torch.float32)
    else:
        weights.cast(torch.float32)
    assert weights.cast_to == torch.float32
    assert set(types(module).values()) == {torch.float32, torch.int64}
    weights.cast(None)
    assert weights.cast_to is None and types(module) == before
    assert all(torch.equal(t, values[name]) for name, t in module.state_dict().items())


def test_a_module_without_weights() -> None:
    weights = Weights(torch.nn.ReLU())
    weights.cast(torch.float16)
    assert weights.cast_to is None


def test_a_session_sees_its_own_casts_and_nobody_else_s(bench: Bench) -> None:
    module = bench.modules.text_encoder

    def body(own: Any) -> list[torch.dtype]:
        seen = [module.weight.dtype]
        own.text_encoder(torch.ones(1, 2))
        seen.append(module.weight.dtype)
        own.text_encoder.to(torch.float64)
        own.text_encoder(torch.ones(1, 2))
        seen.append(module.weight.dtype)
        own.text_encoder.to(torch.float32)
        own.text_encoder(torch.ones(1, 2))
        seen.append(module.weight.dtype)
        own.text_encoder.to(torch.float16)  # and leaves it so
        return seen

    sessions = [bench.session(body) for _ in range(2)]
    calls = []
    sessions[0].resume()
    bench.runner.execute(sessions[0].take_calls())
    while not all(session.finished for session in sessions):
        for session in sessions:
            if session.ready:
                session.resume()
            assert module.weight.dtype == torch.float32
            made = session.take_calls()
            calls += [call.weights for call in made]
            bench.runner.execute(made)
            assert module.weight.dtype == torch.float32
    wanted = [torch.float32, torch.float32, torch.float64, torch.float32]
    assert [session.result for session in sessions] == [wanted, wanted]
    assert sorted(calls, key=str) == [None, None, None, torch.float64, torch.float64]


def test_a_session_that_is_cancelled_leaves_no_cast(bench: Bench) -> None:
    def body(own: Any) -> None:
        own.vae.to(torch.float64)
        own.vae.decode(torch.ones(1, 2))

    session = bench.session(body)
    session.resume()
    assert list(session.casts.values()) == [torch.float64]
    session.cancel()
    assert bench.modules.vae.weight.dtype == torch.float32


class StrictVae(Vae):
    """As convolutions are: inputs and weights have one type, and half precision does not reach far."""

    def __init__(self) -> None:
        super().__init__()
        self.half()

    def encode(self, pixels: torch.Tensor) -> Any:
        return (self._checked(pixels),)

    def decode(self, latents: torch.Tensor) -> Any:
        return (super().decode(self._checked(latents))[0].float(),)

    def _checked(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.dtype:
            raise RuntimeError(f"input type {x.dtype} and weight type {self.dtype} should be the same")
        return x * float("inf") if x.dtype == torch.float16 else x


class StableDiffusionXLPipeline(FakePipeline):
    """As its namesake in diffusers: the autoencoder works in full precision, and is cast around its calls."""

    def encode(self, prompt: str) -> torch.Tensor:
        self.vae.to(torch.float32)
        self.vae.encode(torch.ones(1, 3, 2, 2))
        self.vae.to(torch.float16)
        return super().encode(prompt)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        needs_upcasting = self.vae.dtype == torch.float16
        if needs_upcasting:
            self.vae.to(torch.float32)
            latents = latents.float()
        else:
            latents = latents.half()
        pixels = super().decode(latents)
        if needs_upcasting:
            self.vae.to(torch.float16)
        return pixels


@pytest.mark.parametrize("in_flight", [1, 8])
def test_pipelines_that_cast_their_decoder_run_side_by_side(in_flight: int) -> None:
    pipeline = pipeline_of(StableDiffusionXLPipeline)
    pipeline.vae = StrictVae()
    requests = [request_of(f"r{i}", steps=3 + i % 2, seed=i) for i in range(5)]
    wanted = [solo(pipeline, request) for request in requests]
    pipeline.vae.batches.clear()
    engine = engine_of(pipeline, max_num_seqs=in_flight)
    for request in requests:
        engine.add(request)
    for _ in range(6):
        engine.step()
    engine.abort("r4")
    done = outcome(engine)
    for request, want in list(zip(requests, wanted, strict=True))[:4]:
        np.testing.assert_array_equal(pixels(done[request.request_id]), want)
    assert pipeline.vae.dtype == torch.float16
    assert (max(pipeline.vae.batches) > 1) == (in_flight > 1)
