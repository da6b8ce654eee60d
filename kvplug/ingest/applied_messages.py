"""The messages of a stream that were applied: what of the engine's blocks is known, and how well.

In:  numbers and payloads in the order in which they are to be applied.
Out: calls of a Sink, the last number, and the flaw: a TrustState.
"""

from __future__ import annotations

from typing import Protocol

from kvplug.ingest import trust
from kvplug.ingest.applier import Effect
from kvplug.ingest.recent import RecentMessages
from kvplug.ingest.trust import TrustState

Numbered = tuple[int, bytes]
Message = tuple[int | None, bytes]

# A replay may cure these: what came before them was lost or damaged on the way.
_CURABLE = frozenset(("unknown_parent", "undecodable"))


class Sink(Protocol):
    """Where payloads go (ingest/applier.py)."""

    def apply(self, payloads: list[bytes]) -> Effect:
        """Apply them in order."""

    def clear(self) -> None:
        """Forget all that the publisher said."""


class AppliedMessages:
    """apply, apply_unnumbered; skip_to, start_over, clear, forget.

    leading_in_order, is_repeated, is_late, remembers: how others stand to them.

    `last`: number of the last one; -1 if number 0 is the next, None if nothing is known.
    `flaw`: what the blocks that are known lack.
    """

    def __init__(self, sink: Sink) -> None:
        self.last: int | None = None
        self.flaw: TrustState = trust.NEVER_CONNECTED
        self._sink = sink
        self._recent = RecentMessages()
        self._given_up: range = range(0)

    @property
    def next_number(self) -> int:
        """The number that follows."""
        return 0 if self.last is None else self.last + 1

    def leading_in_order(self, messages: list[Message]) -> list[Numbered]:
        """The first of them that follow without a gap."""
        run: list[Numbered] = []
        first = self.next_number
        for number, payload in messages:
            if number is None or number != first + len(run):
                break
            run.append((number, payload))
        return run

    def apply(self, run: list[Numbered]) -> bool:
        """Apply messages; returns whether a replay may cure what is wrong with them."""
        for number, payload in run:
            self._recent.remember(number, payload)
        if self.last is None and run[0][0] == 0:
            self.flaw = trust.EXACT  # the first that the engine published: nothing is missing
        is_curable = self._pass_on([payload for _, payload in run])
        self.last = run[-1][0]  # now, as who reads it takes them for applied
        return is_curable

    def apply_unnumbered(self, payload: bytes) -> bool:
        """As `apply`, for a message that says nothing of its place."""
        self.flaw = trust.UNNUMBERED
        return self._pass_on([payload])

    def _pass_on(self, payloads: list[bytes]) -> bool:
        effect = self._sink.apply(payloads)
        if effect.cleared:
            self.flaw = trust.EXACT
        for reason in effect.defects:
            self.flaw = trust.unusable(reason)
        return bool(effect.defects.keys() & _CURABLE)

    def skip_to(self, number: int, flaw: TrustState) -> None:
        """This number follows; those between are given up, and with them what was known."""
        self._given_up = range(self.next_number, number)
        self.clear(flaw)
        self.last = number - 1

    def start_over(self, last: int) -> None:
        """The messages behind number `last` follow; -1: all that there are."""
        self.forget()
        self.last = last
        self.flaw = trust.EXACT if last < 0 else trust.truncated(last + 1)

    def clear(self, flaw: TrustState) -> None:
        """The blocks are not known any more; the messages are."""
        self._sink.clear()
        self.flaw = flaw

    def forget(self) -> None:
        """Neither blocks nor messages are known any more."""
        self.clear(trust.SILENT)
        self._recent.forget()
        self.last = None
        self._given_up = range(0)

    def remembers(self, number: int) -> bool:
        """Whether it is among the last ones, whatever was in it."""
        return self._recent.knows(number)

    def is_repeated(self, number: int, payload: bytes) -> bool:
        """Whether this very message was applied lately."""
        if self.last is None or number > self.last:
            return False
        return self._recent.is_same(number, payload)

    def is_late(self, number: int) -> bool:
        """Whether it was given up: later ones overtook it. A 0 is more likely another life."""
        return number in self._given_up and number != 0
