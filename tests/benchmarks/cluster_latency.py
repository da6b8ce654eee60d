"""From publish() to the block being found: ZMQ direct, NATS core, a stream of one and of three
servers, in turns.

In:  rates, rounds.
Out: {"way@rate": {"p25_us" to "p99_us", the spread of the rounds, "cpu_us" of each process}}

A way is a publisher, a replica and its servers; they live through the whole measurement, and each
round sends the same number of messages through each of them. CPU is that of whole processes per
message; the publisher's without what the same program takes if it publishes nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from tests.benchmarks.cluster_servers import Servers, servers
from tests.benchmarks.cluster_sides import side

WAYS = ("zmq", "core", "r1", "r3")
WARM_UP = 200


class Way:
    """round: one round of messages."""

    def __init__(self, name: str, nats: Servers | None, stack: ExitStack) -> None:
        self.name, self._nats = name, nats
        self.publisher = stack.enter_context(side("publisher"))
        self.replica = stack.enter_context(side("replica"))
        self._num_blocks = 0
        self._base_s: dict[int, float] = {}
        self._open()

    def _open(self) -> None:
        via = self.name if self.name in ("zmq", "core") else "stream"
        case = {"what": "open", "workers": [f"http://{self.name}:8000"], "via": via, "looks": True}
        case |= {"endpoint": "tcp://127.0.0.1:0", "fleet": self.name}
        if self._nats is not None:
            case |= {"endpoint": self._nats.url, "servers": self._nats.url}
        if via == "stream":
            self._nats.prepare(self.name)
        case["endpoints"] = self.publisher.measure(case)
        self.replica.measure(case)
        self.replica.measure({"what": "trusts"})

    def round(self, rate: int, num_messages: int) -> dict[str, Any]:
        """Latencies in us, CPU in us a message."""
        case = {"what": "paced", "rate": rate, "num": num_messages}
        if rate not in self._base_s:
            self._base_s[rate] = self.publisher.measure({**case, "silent": True})["cpu_s"]
        before_s = self._nats.cpu_s() if self._nats else 0.0
        sent = self.publisher.measure(case)
        self._num_blocks += 16 * num_messages
        got = self.replica.measure({"what": "await", "blocks": self._num_blocks})
        server_s = self._nats.cpu_s() - before_s if self._nats else 0.0
        cpu_s = (sent["cpu_s"] - self._base_s[rate], server_s, got["cpu_s"])
        first = self._num_blocks - 16 * num_messages
        return {
            "latencies": list(_latencies(sent["stamps"], got["found"], first)),
            "cpu": [each / num_messages * 1e6 for each in cpu_s],
        }


def _latencies(stamps: list[int], found: list[list[int]], first: int) -> Iterator[float]:
    """One for each event; several may have come in one message."""
    at = 0
    for num_blocks, when in found:
        until = (num_blocks - first) // 16
        yield from ((when - stamp) / 1e3 for stamp in stamps[at:until])
        at = until
    assert at == len(stamps), (at, len(stamps))


def measure(
    rates: tuple[int, ...], num_rounds: int, round_s: float, ways: tuple[str, ...] = WAYS
) -> dict[str, Any]:
    """All ways at all rates, round by round."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        opened = [Way(name, _servers_of(name, stack), stack) for name in ways]
        for way in opened:
            way.round(1000, WARM_UP)
        for _ in range(num_rounds):
            for rate in rates:
                for way in opened:
                    result = way.round(rate, max(1, int(rate * round_s)))
                    rounds.setdefault(f"{way.name}@{rate}", []).append(result)
    return {name: _row(results) for name, results in rounds.items()}


def _servers_of(name: str, stack: ExitStack) -> Servers | None:
    if name == "zmq":
        return None
    return stack.enter_context(servers(3 if name == "r3" else 1))


def _row(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each round its percentiles; of those the median, and the spread of two of them."""
    at = {"p25": 0.25, "p50": 0.5, "p75": 0.75, "p99": 0.99}
    found = {
        name: [
            sorted(each["latencies"])[int(share * (len(each["latencies"]) - 1))] for each in rounds
        ]
        for name, share in at.items()
    }
    row: dict[str, Any] = {f"{n}_us": round(statistics.median(v)) for n, v in found.items()}
    row |= {f"{n}_us spread": [round(min(found[n])), round(max(found[n]))] for n in ("p50", "p99")}
    cpu = [statistics.median(values) for values in zip(*(r["cpu"] for r in rounds), strict=True)]
    names = ("publisher", "server", "replica")
    row["cpu_us"] = {name: round(us) for name, us in zip(names, cpu, strict=True)}
    return row
