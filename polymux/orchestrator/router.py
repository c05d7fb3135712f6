"""The way of a request through the stages: which replica has it, what is under way there, and how that ends.

Knows replicas by what they hold, and requests by their tickets; not whether the model works as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from polymux.errors import NotReadyError, PolymuxError, StageDeadError, from_info
from polymux.messages import Abort, Add, Taken
from polymux.orchestrator.balance import Pool
from polymux.orchestrator.leg import Leg
from polymux.orchestrator.replica import Replica
from polymux.orchestrator.tickets import Ticket, Tickets
from polymux.request import Event, Failed, Finished, OutputChunk, Request, SoundPiece


class Router:
    """Between the requests and the stages of one model, which are in the order of the way."""

    def __init__(self, stages: Sequence[Pool], tickets: Tickets) -> None:
        self._stages, self._tickets = stages, tickets

    def begin(self, request: Request) -> Ticket:
        """Send a request to the first stage. Raises NotReadyError, PayloadTooLargeError; then nobody has it."""
        replica = self._stages[0].choose(request)
        if replica is None:
            raise NotReadyError("no replica is ready")
        replica.send(Add(request))
        ticket = self._tickets.open(request.request_id)
        self._hold(ticket, request, replica)
        return ticket

    def used(self, ticket: Ticket) -> None:
        """The consumer has used up a part of the output: the last stage may send another one."""
        leg = ticket.legs.get(len(self._stages) - 1)
        if leg is not None:
            leg.unused -= 1
            leg.send(Taken(ticket.request_id))

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
            case Failed(_, error):
                self._let_go(ticket, replica)
                self._fail(ticket, from_info(error))
            case Finished():
                self._let_go(ticket, replica)
                self._tickets.end(ticket, event)
            case news:
                if isinstance(event, (OutputChunk, SoundPiece)):
                    leg.unused += 1
                self._tickets.deliver(news)

    def lost(self, replica: Replica) -> None:
        """A replica's process is gone, and all that it held. Other requests do not notice."""
        for request_id in list(replica.legs):
            ticket = self._tickets.get(request_id)
            if ticket is not None:
                self._let_go(ticket, replica)
                self._fail(ticket, StageDeadError("the model's process died while it held the request"))
        replica.legs.clear()

    def _hold(self, ticket: Ticket, request: Request, replica: Replica) -> None:
        outputs = 1 if request.sampling is not None else request.params.num_outputs_per_prompt
        replica.legs[request.request_id] = ticket.legs[replica.stage] = Leg(replica.send, outputs)

    def _let_go(self, ticket: Ticket, replica: Replica) -> None:
        replica.legs.pop(ticket.request_id, None)
        ticket.legs.pop(replica.stage, None)
        self._tickets.release(ticket)

    def _fail(self, ticket: Ticket, error: PolymuxError) -> None:
        self._tickets.fail(ticket, error)
        self._stop(ticket)

    def _stop(self, ticket: Ticket) -> None:
        """Tell every stage that still holds it that nobody waits any more."""
        for leg in ticket.legs.values():
            leg.aborted = True
            leg.send(Abort(ticket.request_id))
