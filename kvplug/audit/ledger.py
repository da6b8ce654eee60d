"""What the audit of one rank has found.

In:  expectations with what the engine reported.   Out: counts, an error histogram, two rates.

    incorrect_rate  wrong / audited over the last 1024 audited requests
    accuracy        of the blocks that the index had for them, the share that the engine had,
                    over the last 256, with a prior: what residency of a rank is worth whose
                    events are not all known
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from itertools import accumulate

from kvplug.audit.contradictions import Contradictions
from kvplug.audit.expectation import Expectation, Verdict

ERROR_BOUNDS = (-256, -64, -16, -4, -1, 0, 1, 4, 16, 64, 256)
"""Upper bounds of the histogram of predicted - reported, in blocks; what is above has none."""

_RATE_WINDOW = 1024
_ACCURACY_WINDOW = 256
_EVIDENCE_WINDOW = 256
_KNOWN_WINDOW = 32
_STEADY_WINDOW = 8

# As if 64 blocks had been audited and half of them found: one answer alone moves little.
_PRIOR_BLOCKS = 64.0
_PRIOR_ACCURACY = 0.5


class RankLedger:
    """enter an audited request, skip one that cannot be audited; read the rest.

    num_by_verdict, num_skipped by reason; for the diagnosis: num_silent (answers in a row whose
    usage says nothing of cached tokens although some were expected), counts_differ (whether the
    engine counted other prompt tokens than the router, of the last 256), last_counts (ours, the
    engine's), was_stored (whether the index knew any block of a prompt after its answer, of the
    last 32), contradictions.
    """

    def __init__(self) -> None:
        self.num_by_verdict: Counter[Verdict] = Counter()
        self.num_skipped: Counter[str] = Counter()
        self.num_silent = 0
        self.counts_differ: deque[bool] = deque(maxlen=_EVIDENCE_WINDOW)
        self.last_counts = (0, 0)
        self.was_stored: deque[bool] = deque(maxlen=_KNOWN_WINDOW)
        self.contradictions = Contradictions()
        self._num_by_bound = [0] * (len(ERROR_BOUNDS) + 1)
        self._wrong: deque[bool] = deque(maxlen=_RATE_WINDOW)
        self._blocks: deque[tuple[int, int]] = deque(maxlen=_ACCURACY_WINDOW)
        self._num_resident = self._num_found = 0
        self._errors: deque[int] = deque(maxlen=_STEADY_WINDOW)

    @property
    def num_audited(self) -> int:
        """Requests with a verdict."""
        return self.num_by_verdict.total()

    @property
    def num_wrong(self) -> int:
        """Incorrectly routed requests among them."""
        return sum(count for verdict, count in self.num_by_verdict.items() if verdict.is_wrong)

    @property
    def incorrect_rate(self) -> float:
        """Wrong / audited over the window; 0 before the first."""
        return sum(self._wrong) / len(self._wrong) if self._wrong else 0.0

    @property
    def accuracy(self) -> float:
        """In (0, 1); 0.5 before anything is known."""
        found = _PRIOR_BLOCKS * _PRIOR_ACCURACY + self._num_found
        return found / (_PRIOR_BLOCKS + self._num_resident)

    @property
    def error_histogram(self) -> list[tuple[str, int]]:
        """Upper bound and cumulative count, as Prometheus has them."""
        bounds = [*map(str, ERROR_BOUNDS), "+Inf"]
        return list(zip(bounds, accumulate(self._num_by_bound), strict=True))

    def enter(self, expectation: Expectation, cached_tokens: int, verdict: Verdict) -> None:
        """An answer was judged."""
        self.num_by_verdict[verdict] += 1
        self._wrong.append(verdict.is_wrong)
        self._num_by_bound[bisect_left(ERROR_BOUNDS, expectation.error(cached_tokens))] += 1
        resident = min(expectation.resident, expectation.limit)
        self._measure(resident, min(resident, expectation.reported(cached_tokens)))

    def note_error(self, error: int) -> int:
        """The error of a request that counted on resident blocks, in blocks; returns 1 or -1 if the
        last ones were all off by that, and starts over, else 0.
        """
        self._errors.append(error)
        is_steady = len(self._errors) == _STEADY_WINDOW and len(set(self._errors)) == 1
        if is_steady and abs(error) == 1:
            self._errors.clear()
            return error
        return 0

    def skip(self, reason: str) -> None:
        """A request could not be audited."""
        self.num_skipped[reason] += 1

    def compare_counts(self, ours: int, engines: int) -> bool:
        """Whether the engine counted as many prompt tokens as the router did."""
        self.counts_differ.append(ours != engines)
        if ours != engines:
            self.last_counts = (ours, engines)
        return ours == engines

    def _measure(self, num_resident: int, num_found: int) -> None:
        if len(self._blocks) == self._blocks.maxlen:
            oldest_resident, oldest_found = self._blocks[0]
            self._num_resident -= oldest_resident
            self._num_found -= oldest_found
        self._blocks.append((num_resident, num_found))
        self._num_resident += num_resident
        self._num_found += num_found
