"""What of an event stream could not be used: counted by reason, named once in the log.

In:  reasons, with how often.   Out: a counter, and one line in the log for each reason.
"""

from __future__ import annotations

import logging
from collections import Counter

from kvplug.events import Rank
from kvplug.index.applied import Refusal

logger = logging.getLogger(__name__)

_CURE = {
    Refusal.BLOCK_SIZE.value: "start the router with the engine's --block-size",
    Refusal.UNKNOWN_PARENT.value: "events were lost or began before the router; the engine's "
    "blocks become known again as it stores new prefixes, or at once when it restarts",
    Refusal.CONFLICTING_HASH.value: "the engine gives one id to two contents",
    Refusal.BIGRAM_TOKENS.value: "speculative decoding with EAGLE keys blocks by pairs of tokens; "
    "route such engines by load",
    "undecodable": "check that the endpoint is an event publisher and no other service",
}


class Skips:
    """add; read `by_reason`."""

    def __init__(self, rank: Rank) -> None:
        self.by_reason: Counter[str] = Counter()
        self._rank = rank

    def add(self, reason: str, count: int = 1, detail: str = "") -> None:
        """Count, and log the first of each reason with its cure."""
        if not self.by_reason[reason]:
            cure = _CURE.get(reason, "")
            logger.warning("%s: events skipped: %s %s %s", self._rank, reason, detail, cure)
        self.by_reason[reason] += count
