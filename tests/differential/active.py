"""Blocks of live requests on one worker, answers included, by plain rules: kvplug's and Dynamo's.

In:  requests that begin, add blocks of their answers, and end.   Out: how many blocks that are.

A request that nears its end, a fraction f of its answer left, counts f for each block of the answer
and for each of the last blocks of its prompt that it alone has. They differ in what becomes of
these prompt blocks, `stale`: in Dynamo 1.6.1 a block goes on to count f, whoever comes to it, until
the last request that has it alone says otherwise, or all that have it are over. In kvplug it is the
request that counts less, by as much as it said last, until it is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Request:
    path: tuple[int, ...]
    num_outputs: int = 0
    outputs: float = 0.0
    less: float = 0.0


@dataclass(slots=True)
class ActiveBlocks:
    """`keeps`: as in Dynamo, blocks keep what they count."""

    keeps: bool
    _requests: dict[str, _Request] = field(default_factory=dict)
    _weights: dict[int, float] = field(default_factory=dict)

    def start(self, request_id: str, path: tuple[int, ...]) -> None:
        """A request with these full blocks."""
        self._requests[request_id] = _Request(path)
        for name in path:
            self._weights.setdefault(name, 1.0)

    def add_output(self, request_id: str, fraction: float | None) -> None:
        """It has filled a block of its answer."""
        request = self._requests[request_id]
        request.num_outputs += 1
        request.outputs += 1.0
        if fraction is None:
            return
        request.outputs = fraction * request.num_outputs
        own = request.path[self._num_shared(request) :]
        if self.keeps:
            self._weights.update(dict.fromkeys(own, fraction))
        else:
            request.less = (1.0 - fraction) * len(own)

    def end(self, request_id: str) -> None:
        """It is over."""
        del self._requests[request_id]
        left = {name for request in self._requests.values() for name in request.path}
        for name in [name for name in self._weights if name not in left]:
            del self._weights[name]

    def count(self) -> int:
        """Blocks, rounded."""
        requests = self._requests.values()
        outputs = [request.outputs - request.less for request in requests]
        return math.floor(sum(self._weights.values()) + sum(outputs) + 0.5)

    def count_with(self, path: Sequence[int]) -> int:
        """With a prompt that came."""
        return self.count() + sum(name not in self._weights for name in path)

    def _num_shared(self, request: _Request) -> int:
        """Leading blocks that another request has, too."""
        others = [each.path for each in self._requests.values() if each is not request]
        return max((_num_common(request.path, other) for other in others), default=0)


def _num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    pairs = list(zip(first, second, strict=False))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
