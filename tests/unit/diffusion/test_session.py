"""A session: suspended where it needs a result, ended where it stands, with state of its own."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet
from session_bench import Bench, ones

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
    assert bench.runner.runs == {}


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
