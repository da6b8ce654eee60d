"""The data-parallel ranks of one simulated engine, each with a scheduler and a cache of its own.

In:  a request's headers.   Out: the rank that runs it, chosen as vLLM 0.32 does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from kvplug.http_service import RANK_HEADER
from kvplug.sim.completions import vllm_error
from kvplug.sim.runner import EngineRunner


class Ranks:
    """The runners, by rank; `for_request` chooses one."""

    def __init__(self, runners: Sequence[EngineRunner]) -> None:
        self._runners = runners
        self._first = 0

    def __iter__(self) -> Iterator[EngineRunner]:
        return iter(self._runners)

    def for_request(self, headers: Mapping[str, str]) -> EngineRunner:
        """The rank that the header names; without one, that with the fewest requests.

        What is no number counts as no header; ApiError for a number that is no rank.
        """
        with suppress(KeyError, ValueError):
            return self._named(int(headers[RANK_HEADER]))
        self._first = (self._first + 1) % len(self._runners)
        in_turn = [*self._runners[self._first :], *self._runners[: self._first]]
        return min(in_turn, key=lambda runner: runner.num_requests)

    def _named(self, rank: int) -> EngineRunner:
        if not 0 <= rank < len(self._runners):
            limits = f"[0, {len(self._runners)})"
            raise vllm_error(400, f"data_parallel_rank {rank} is out of range {limits}.")
        return self._runners[rank]
