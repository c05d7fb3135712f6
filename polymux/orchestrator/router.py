"""The way of a request through the stages: which replica has it, what is under way there, and how that ends.

A model of one stage is the ordinary case: there, nothing is handed on. Knows replicas by what they hold, and requests
by their tickets; not whether the model works as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from polymux.errors import NotReadyError, PolymuxError, StageDeadError, from_info
from polymux.messages import Abort, Add, Taken
from polymux.metrics import Metrics
from polymux.orchestrator.balance import Pool
from polymux.orchestrator.leg import Leg
from polymux.orchestrator.replica import Replica
from polymux.orchestrator.tickets import Ticket, Tickets
from polymux.parcel import Chunk, Consumed
from polymux.request import (
    Event,
    Failed,
    Finished,
    OutputChunk,
    Preview,
    Progress,
    Request,
    RequestMetrics,
    SoundPiece,
    TextPiece,
)

_TOKENS = ("text_tokens", "prompt_tokens", "completion_tokens", "audio_tokens")
_ADDED = ("encode", "denoise", "decode", "steps", *_TOKENS)


class Router:
    """Between the requests and the stages of one model, which are in the order of the way."""

    def __init__(self, stages: Sequence[Pool], tickets: Tickets, metrics: Metrics) -> None:
        self._stages, self._tickets, self._metrics = stages, tickets, metrics

    def begin(self, request: Request) -> Ticket:
        """Send a request to the first stage. Raises NotReadyError, PayloadTooLargeError; then nobody has it."""
        replica = self._stages[0].choose(request)
        if replica is None:
            raise NotReadyError("no replica is ready")
        replica.send(Add(request))
        ticket = self._tickets.open(request)
        self._hold(ticket, replica)
        return ticket

    def used(self, ticket: Ticket) -> None:
        """The consumer has used up a part of the output: the last stage may send another one."""
        self._go_on(ticket, len(self._stages) - 1)

    def abort(self, request_id: str) -> bool:
        """End a request for its consumer now and in the stages soon. False if it is unknown or has ended."""
        ticket = self._tickets.get(request_id)
        if ticket is None or not self._tickets.abort(request_id):
            return False
        self._stop(ticket)
        return True

    def abort_all(self, error: PolymuxError) -> None:
        """End all requests, with an error like this for their consumers."""
        for request_id in self._tickets.live_ids():
            ticket = self._tickets.get(request_id)
            if ticket is not None:
                self._fail(ticket, error)

    def said(self, replica: Replica, event: Event) -> None:
        """A replica says something about a request."""
        ticket, leg = self._tickets.get(event.request_id), replica.legs.get(event.request_id)
        if ticket is None or leg is None:
            return
        match event:
            case Progress() | Preview() | TextPiece():
                if replica.stage == 0 or 0 not in ticket.legs:  # how far it is, the first stage says while it is there
                    self._tickets.deliver(ticket, event)
            case OutputChunk() | SoundPiece():
                leg.unused += 1
                self._tickets.deliver(ticket, event)
            case Failed(_, error):
                self._let_go(ticket, replica)
                self._fail(ticket, from_info(error))
            case Finished():
                ticket.done[replica.stage] = event
                self._let_go(ticket, replica)
            case Chunk():
                leg.unused += 1
                self._hand_on(ticket, replica, event)
            case Consumed(_, seconds):
                leg.unread -= 1
                self._metrics.arrived(replica.stage - 1, replica.stage, seconds)
                self._go_on(ticket, replica.stage - 1)

    def lost(self, replica: Replica) -> None:
        """A replica's process is gone, and all that it held. Other requests do not notice."""
        for request_id in list(replica.legs):
            ticket = self._tickets.get(request_id)
            replica.let_go(request_id)
            if ticket is not None:
                self._let_go(ticket, replica)
                self._fail(ticket, StageDeadError("the model's process died while it held the request"))

    def _hand_on(self, ticket: Ticket, source: Replica, chunk: Chunk) -> None:
        """To the next stage, which hears of the request with its first chunk."""
        stage = source.stage + 1
        if ticket.ended:
            return
        if stage not in ticket.legs:
            replica = self._stages[stage].choose(ticket.request)
            if replica is None:
                self._fail(ticket, StageDeadError("a process of the model is gone that the request needs"))
                return
            replica.send(Add(ticket.request))
            self._hold(ticket, replica)
        leg = ticket.legs[stage]
        leg.unread += 1
        leg.more_to_come = not chunk.last
        leg.send(chunk)
        self._metrics.handed_on(source.stage, stage, chunk.parcel.nbytes)

    def _go_on(self, ticket: Ticket, stage: int) -> None:
        """Something that this stage has made is used up."""
        leg = ticket.legs.get(stage) or ticket.past.get(stage)
        if leg is not None:
            leg.unused -= 1
            leg.send(Taken(ticket.request_id))

    def _hold(self, ticket: Ticket, replica: Replica) -> None:
        request = ticket.request
        outputs = 1 if request.sampling is not None else request.params.num_outputs_per_prompt
        leg = Leg(replica.send, outputs, more_to_come=replica.stage > 0)
        ticket.legs[replica.stage], ticket.reached = leg, replica.stage
        replica.hold(request.request_id, leg)

    def _let_go(self, ticket: Ticket, replica: Replica) -> None:
        replica.let_go(ticket.request_id)
        if (leg := ticket.legs.pop(replica.stage, None)) is not None and replica.stage < len(self._stages) - 1:
            ticket.past[replica.stage] = leg
        last = ticket.done.get(ticket.reached)  # not always the last one of the model: a stage may hand on nothing
        if last is not None and not ticket.legs:
            self._tickets.end(
                ticket, last if len(self._stages) == 1 else together(ticket.done, time.monotonic() - ticket.admitted)
            )
        self._tickets.release(ticket)

    def _fail(self, ticket: Ticket, error: PolymuxError) -> None:
        self._tickets.fail(ticket, error)
        self._stop(ticket)

    def _stop(self, ticket: Ticket) -> None:
        """Tell every stage that still holds it that nobody waits any more."""
        for leg in (*ticket.legs.values(), *ticket.past.values()):  # those may hold what they have handed on
            leg.aborted = True
            leg.send(Abort(ticket.request_id))


def together(done: Mapping[int, Finished], total: float) -> Finished:
    """The output of the last stage, with the work of all of them, and the seeds and the text of the first. `done`: by
    stage; `total`: seconds."""
    ends = [done[stage] for stage in sorted(done)]
    added = {name: sum(getattr(end.metrics, name) for end in ends) for name in _ADDED}
    metrics = RequestMetrics(queue=ends[0].metrics.queue, total=total, **added)
    cut = next((end.finish_reason for end in ends if end.finish_reason == "length"), ends[0].finish_reason)
    return replace(ends[-1], seeds=ends[0].seeds, text=ends[0].text, finish_reason=cut, metrics=metrics)
