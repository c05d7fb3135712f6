"""A session: suspended where it needs a result, ended where it stands, with state of its own."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet
from session_bench import Bench, ones

from polymux.diffusion.component import Component
from polymux.diffusion.session import ResultSpecs
from polymux.errors import GenerationError, NonFiniteOutputError

# Waiting.


def test_nothing_runs_before_the_first_resume(bench: Bench) -> None:
    started = []
    session = bench.session(lambda own: started.append(own))
    assert session.ready and not session.finished and not started
    session.resume()
    assert session.finished and not session.ready and len(started) == 1


def test_a_session_waits_for_its_call(bench: Bench) -> None:
    session = bench.session(lambda own: own.text_encoder(ones()) + 1)
    session.resume()
    (call,) = session.take_calls()
    assert not session.ready and session.blocked_on is call and session.take_calls() == []
    assert call.component.name == "text_encoder" and call.phase == "encode"
    call.finish(ones() * 5)
    assert session.ready
    session.resume()
    assert session.finished and session.result.tolist() == [[6, 6]]


def test_calls_run_outside_the_session(bench: Bench) -> None:
    session = bench.session(lambda own: (own.text_encoder(ones()), getcurrent()))
    bench.finish(session)
    assert bench.modules.text_encoder.ran_in == [getcurrent()]
    assert session.result[1] is not getcurrent()


def test_a_session_may_be_driven_from_another_greenlet_than_it_was_opened_in(bench: Bench) -> None:
    session = bench.session(lambda own: own.text_encoder(ones()) + 1)
    session.resume()
    greenlet(lambda: bench.runner.execute(session.take_calls())).switch()
    outer = greenlet(session.resume)
    outer.switch()
    assert outer.dead and session.finished and session.result.tolist() == [[3, 3]]


def test_an_error_of_a_call_is_raised_where_it_was_made(bench: Bench) -> None:
    def body(own: Any) -> str:
        try:
            own.text_encoder(ones())
        except RuntimeError as error:
            return f"caught {error}"
        return "nothing"

    session = bench.session(body)
    session.resume()
    session.take_calls()[0].fail(RuntimeError("it broke"))
    session.resume()
    assert session.finished and session.result == "caught it broke" and session.error is None


def test_an_error_ends_the_session_and_holds_nothing(bench: Bench) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def body(own: Any) -> None:
        latents = own.text_encoder(ones())
        held.append(weakref.ref(latents))
        raise LookupError("no such thing")

    session = bench.session(body)
    bench.finish(session)
    assert isinstance(session.error, LookupError) and session.result is None
    assert held[0]() is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_the_session_and_goes_on_to_the_caller(bench: Bench, kind: type[BaseException]) -> None:
    def body(own: Any) -> None:
        raise kind

    session = bench.session(body)
    with pytest.raises(kind):
        session.resume()
    assert session.finished and isinstance(session.error, kind)


def test_a_result_read_outside_the_session_is_an_error(bench: Bench) -> None:
    shelf: list[torch.Tensor] = []

    def body(own: Any) -> None:
        own.transformer(ones())  # learns its shape
        shelf.append(own.transformer(ones()))
        own.text_encoder(ones())

    session = bench.session(body)
    for _ in range(2):
        session.resume()
        calls = session.take_calls()
        if not shelf:
            bench.runner.execute(calls)
    with pytest.raises(GenerationError, match="outside its request"):
        shelf[0].sum()
    session.cancel()
    with pytest.raises(GenerationError, match="outside its request"):
        shelf[0].sum()


# Cancelling.


def test_cancelling_before_it_starts(bench: Bench) -> None:
    session = bench.session(lambda own: pytest.fail("it ran"))
    session.cancel()
    assert session.finished and session.error is None


def test_cancelling_cleans_up(bench: Bench) -> None:
    cleaned = []

    def body(own: Any) -> None:
        try:
            own.text_encoder(ones())
        except Exception:
            cleaned.append("as an error")
        finally:
            cleaned.append("finally")

    session = bench.session(body)
    session.resume()
    session.cancel()
    session.cancel()
    assert session.finished and cleaned == ["finally"] and session.result is None


def test_cancelling_what_has_ended(bench: Bench) -> None:
    session = bench.session(lambda own: 3)
    session.resume()
    session.cancel()
    assert session.result == 3


def test_a_pipeline_that_catches_everything_still_ends(bench: Bench) -> None:
    reached = []

    def body(own: Any) -> None:
        for i in range(5):
            try:
                own.text_encoder(ones())
            except:  # noqa: E722
                reached.append(i)
        try:
            own.transformer(ones())
        finally:
            own.vae.decode(ones())

    session = bench.session(body)
    session.resume()
    session.cancel()
    assert session.finished and reached == [0, 1, 2, 3, 4]


def test_a_deferred_result_that_is_read_while_it_ends(bench: Bench) -> None:
    def body(own: Any) -> None:
        own.transformer(ones())
        later = own.transformer(ones())
        try:
            own.text_encoder(ones())
        finally:
            later.sum()

    session = bench.session(body)
    bench.turn(session)
    session.resume()
    session.cancel()
    assert session.finished


def test_an_error_of_the_clean_up_reaches_nobody(bench: Bench) -> None:
    def body(own: Any) -> None:
        try:
            own.text_encoder(ones())
        finally:
            raise RuntimeError("while cleaning up")

    session = bench.session(body)
    session.resume()
    session.cancel()
    assert session.finished


def test_a_cancelled_session_holds_nothing(bench: Bench) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def body(own: Any) -> None:
        latents = torch.ones(3)
        held.append(weakref.ref(latents))
        own.text_encoder(ones())
        pytest.fail(f"it went on with {latents}")

    session = bench.session(body)
    session.resume()
    session.cancel()
    assert held[0]() is None


# What is not finite.


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_latents_that_are_not_finite_are_not_decoded(bench: Bench, bad: float) -> None:
    session = bench.session(lambda own: own.vae.decode(torch.tensor([[1.0, bad]])))
    bench.finish(session)
    assert isinstance(session.error, NonFiniteOutputError) and "vae" in session.error.message
    assert bench.runner.log.read() == []


def test_a_decoder_s_output_must_be_finite(bench: Bench) -> None:
    session = bench.session(lambda own: own.vae.decode(torch.zeros(1, 2)))
    bench.finish(session)
    assert isinstance(session.error, NonFiniteOutputError)


def test_what_is_encoded_need_not_be(bench: Bench) -> None:
    session = bench.session(lambda own: own.vae.encode(torch.tensor([[float("inf")]])).item())
    bench.finish(session)
    assert session.result == float("inf")


# What results look like.


def test_shapes_are_learnt_once_and_forgotten_when_there_are_many(bench: Bench) -> None:
    specs = ResultSpecs(limit=2)
    for i in range(3):
        specs.learn(i, torch.ones(i))
    specs.learn(3, None)
    assert (specs.get(0), specs.get(3)) == (None, None)
    assert specs.get(1).shape == (1,) and specs.get(2).shape == (2,)


def test_the_first_call_of_a_form_runs_at_once_and_later_ones_are_deferred(bench: Bench) -> None:
    def body(own: Any) -> Any:
        return [own.transformer(torch.ones(1, n)).shape[1] for n in (2, 2, 3, 3, 2)]

    session = bench.session(body)
    assert len(bench.turn(session)) == 1
    assert len(bench.turn(session)) == 2, "the deferred one, and the first of another form"
    assert len(bench.turn(session)) == 2
    assert session.finished and session.result == [2, 2, 3, 3, 2]


# Arguments.


class Filling(torch.nn.Module):
    """Writes into what it is given."""

    def forward(self, x: torch.Tensor, notes: list[Any], cache: dict[str, Any] | None = None) -> torch.Tensor:
        notes.append("seen")
        if cache is not None:
            cache["x"] = x
        return x + len(notes)


def attach(bench: Bench, name: str, module: torch.nn.Module) -> None:
    component = Component(name, module, "encoder" if name == "filling" else "denoiser")
    component.attach()
    bench.components.append(component)
    setattr(bench.modules, name, module)


def test_a_component_may_fill_what_it_is_given(bench: Bench) -> None:
    def body(own: Any) -> Any:
        notes: list[Any] = []
        cache: dict[str, Any] = {}
        own.filling(ones(), notes, cache=cache)
        own.filling(ones(), notes, cache=cache)
        return notes, cache

    attach(bench, "filling", Filling())
    session = bench.session(body)
    bench.finish(session)
    assert session.result[0] == ["seen", "seen"] and torch.equal(session.result[1]["x"], ones())


def test_a_container_that_changes_after_a_deferred_call_does_not_change_the_call(bench: Bench) -> None:
    class Reading(torch.nn.Module):
        def forward(self, x: torch.Tensor, more: dict[str, Any]) -> torch.Tensor:
            return x * more["factors"][0]

    def body(own: Any) -> Any:
        more = {"factors": [2]}
        own.reading(ones(), more)
        first = own.reading(ones(), more)
        more["factors"][0] = 3
        return first + own.reading(ones(), more)

    attach(bench, "reading", Reading())
    session = bench.session(body)
    bench.finish(session)
    assert session.error is None and session.result.tolist() == [[5, 5]]


def test_deferred_results_inside_containers_are_passed_as_values(bench: Bench) -> None:
    class Summing(torch.nn.Module):
        def forward(self, parts: Any) -> torch.Tensor:
            assert all(type(part) is torch.Tensor for part in (*parts["list"], *parts["tuple"]))
            return sum(parts["list"]) + sum(parts["tuple"])  # type: ignore[no-any-return]

    def body(own: Any) -> Any:
        own.transformer(ones())
        first, second = own.transformer(ones()), own.transformer(ones())
        return own.summing({"list": [first, ones()], "tuple": (second[:, :1], first)})

    attach(bench, "summing", Summing())
    session = bench.session(body)
    bench.finish(session)
    assert session.error is None and session.result.tolist() == [[7, 7]]


def test_a_pipeline_that_cannot_be_copied_is_its_request_s_error(bench: Bench) -> None:
    bench.modules.scheduler = threading.Lock()
    session = bench.session(lambda own: pytest.fail("it ran"))
    session.resume()
    assert session.finished and isinstance(session.error, TypeError)
