"""One request's way through the router: what each step took, where it went, how it ended.

In:  marks that its handlers set.   Out: histograms, a line of the log, a span, headers.

Whoever works on a request finds its journey with `current()`, and sets a mark when a step is done;
outside of a request the marks go nowhere. Nothing is done per chunk of an answer.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from enum import StrEnum
from time import perf_counter
from typing import Any, Final

from kvplug.router.decider import Decision
from kvplug.server.observability.histogram import SHARE, STEP_S, WAIT_S, Histogram
from kvplug.server.observability.tracing import NO_SPAN, Span

requests_logger = logging.getLogger("kvplug.requests")

REQUEST_ID: Final = "X-Request-Id"
CLIENT_LEFT: Final = 499
"""The status of a request whose client left, as nginx has it."""
_SANE_ID = re.compile(r"[!-~]{1,128}\Z")


class Step(StrEnum):
    """What a request passes, in order; the last two again for each worker that it is sent to."""

    READ = "read"  # the body has arrived
    QUEUE = "queue"  # it has its turn
    PARSE = "parse"
    TOKENIZE = "tokenize"
    DECIDE = "decide"  # hashed, matched, costed, counted as load
    CONNECT = "connect"  # a connection to the worker, and the request on it
    ANSWER = "answer"  # the head of the worker's answer is there


class RequestTimes:
    """The histograms of all requests, `num_by_status` of those that are over."""

    def __init__(self) -> None:
        self.steps = {step: Histogram(STEP_S) for step in Step}
        self.first_token, self.whole = Histogram(WAIT_S), Histogram(WAIT_S)
        self.token_gap, self.cached_share = Histogram(WAIT_S), Histogram(SHARE)
        self.num_by_status: Counter[int] = Counter()


class Journey:
    """mark, note_*, end. `headers`: what the next hop is told besides the request."""

    __slots__ = (
        *("_began", "_explains", "_first_token_s", "_last", "_span", "_times", "client_left"),
        *("_at_end", "decision", "facts", "is_handed_over", "request_id"),
    )

    def __init__(
        self,
        times: RequestTimes,
        request_id: str,
        span: Span = NO_SPAN,
        *,
        explains: bool = False,
    ) -> None:
        self._times, self._span, self.request_id = times, span, request_id
        self._explains, self.client_left = explains, False
        self._began = self._last = perf_counter()
        self._first_token_s = 0.0
        self.decision: Decision | None = None
        self.facts: dict[str, Any] = {}
        self.is_handed_over = False
        self._at_end: list[Callable[[], None]] = []

    def mark(self, step: Step) -> None:
        """The step is done; it began when the one before was."""
        now = perf_counter()
        self._times.steps[step].add(now - self._last)
        self._last = now

    def note_decision(self, decision: Decision, model: str, num_tokens: int, reason: str) -> None:
        """Where it goes and why, with how many tokens of a prompt; again if it is sent elsewhere.

        `reason`: one word (kvplug/server/proxy/deciding.py).
        """
        self.mark(Step.DECIDE)
        self.decision, self.facts["model"] = decision, model
        self.facts["reason"] = reason
        self.facts["tries"] = self.facts.get("tries", 0) + 1
        self.facts["prompt_tokens"] = num_tokens
        if num_tokens:
            self._times.cached_share.add(decision.cached_tokens / num_tokens)

    def note_first_token(self) -> None:
        """The first event of a stream is on its way to the client."""
        now = perf_counter()
        self._first_token_s = now
        self._times.first_token.add(now - self._began)

    def note_tokens(self, num_tokens: int) -> None:
        """How many a stream had, that is over now."""
        self.facts["tokens"] = num_tokens
        if self._first_token_s and num_tokens > 1:
            gap_s = (perf_counter() - self._first_token_s) / (num_tokens - 1)
            self._times.token_gap.add(gap_s)

    def hand_over(self) -> None:
        """Somebody else ends it, later."""
        self.is_handed_over = True

    def at_end(self, call: Callable[[], None]) -> None:
        """What its handler does last: now, or when it ends if it is handed over."""
        if self.is_handed_over:
            self._at_end.append(call)
        else:
            call()

    def release(self) -> None:
        """Do what was left for its end."""
        for call in self._at_end:
            call()
        self._at_end.clear()

    @property
    def headers(self) -> dict[str, str]:
        """Its id; the trace, if there is one, else what the client sent of it stays as it is."""
        headers = {REQUEST_ID: self.request_id} if self.request_id else {}
        return headers | self._span.headers()

    @property
    def answer_headers(self) -> dict[str, str]:
        """What the client is told besides the answer: its id and, if it may know, the decision."""
        headers = {REQUEST_ID: self.request_id} if self.request_id else {}
        if not self._explains or (decision := self.decision) is None:
            return headers
        return headers | {
            "x-kvplug-worker": str(decision.rank),
            "x-kvplug-overlap": str(decision.cached_tokens),
            "x-kvplug-cost": f"{decision.cost:.3f}",
            "x-kvplug-reason": self.facts["reason"],
        }

    def end(self, status: int, total_s: float | None = None) -> None:
        """It is over; `total_s` if somebody knows better how long it took."""
        self.release()
        status = CLIENT_LEFT if self.client_left else status
        total_s = perf_counter() - self._began if total_s is None else total_s
        self._times.whole.add(total_s)
        self._times.num_by_status[status] += 1
        is_logged = requests_logger.isEnabledFor(logging.INFO)
        if is_logged or self._span is not NO_SPAN:
            facts = self._facts_of(status, total_s)
            self._span.end(status, facts)
            if is_logged:
                requests_logger.info("request", extra={"facts": facts})

    def _facts_of(self, status: int, total_s: float) -> dict[str, Any]:
        facts = {"request_id": self.request_id, "status": status, **self.facts}
        if (decision := self.decision) is not None:
            facts["worker"], facts["cost"] = str(decision.rank), round(decision.cost, 3)
            facts["cached_tokens"] = decision.cached_tokens
        if self._first_token_s:
            facts["first_token_ms"] = round(1e3 * (self._first_token_s - self._began), 3)
        facts["total_ms"] = round(1e3 * total_s, 3)
        return facts


_NOWHERE: Final = Journey(RequestTimes(), "")
_current: ContextVar[Journey] = ContextVar("journey")


def current() -> Journey:
    """Of the request that this task works on."""
    return _current.get(_NOWHERE)


def set_current(journey: Journey) -> None:
    """From now on, in this task."""
    _current.set(journey)


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's, if it is short and printable; else a new one."""
    said = headers.get(REQUEST_ID, "")
    return said if _SANE_ID.match(said) else os.urandom(16).hex()
