"""The two routers, told the same: kvplug's in this process, Dynamo's in one of its own.

In:  workers, events, requests.   Out: what each of them makes of that.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from kvplug import codec
from kvplug.events import Event, EventBatch, Rank
from kvplug.hashing import as_tokens
from kvplug.router.config import RouterConfig
from kvplug.router.core import Router
from kvplug.router.options import RouterConfigOverride
from tests.benchmarks.environments import dynamo_python
from tests.benchmarks.sides import Side
from tests.differential.reference import Lengths


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says besides its prompt, in words that both understand."""

    weight: float | None = None  # Dynamo's service reads one of a request, and ignores it
    workers: Collection[int] | None = None
    required_taints: Collection[str] = ()
    preferred_taints: Mapping[str, float] = field(default_factory=dict)


def name_of(worker: int) -> str:
    """What kvplug calls it."""
    return f"w{worker}"


class Kvplug:
    """A router with the cost in blocks."""

    def __init__(
        self, taints: Sequence[Collection[str]], block_size: int, seed: int, **settings: float
    ) -> None:
        config = RouterConfig(
            block_size=block_size, cost="blocks", speculative_ttl_s=0.0, **settings
        )
        self.router = Router(config, clock=lambda: 0.0, random_=random.Random(seed))
        self.num_workers = len(taints)
        for worker, mine in enumerate(taints):
            self.router.add_worker(name_of(worker), taints=mine)

    def publish(self, worker: int, payload: bytes) -> None:
        """A message of a worker."""
        self.router.apply(Rank(name_of(worker)), codec.decode(payload))

    def lengths(self, tokens: Sequence[int]) -> list[Lengths]:
        """Of each worker."""
        index = self.router.index
        found = index.overlap(index.hasher.sequence_hashes(as_tokens(list(tokens))))
        rows = zip(found.device.tolist(), found.host.tolist(), found.held.tolist(), strict=True)
        return [Lengths(*row) for row in rows][: self.num_workers]

    def costs(self, tokens: Sequence[int], asked: Asked) -> tuple[int, dict[int, float]]:
        """Which worker it would be, and what it costs on each that may take it, in blocks."""
        options = _options(asked)
        decision = self.router.peek(tokens, num_ranked=self.num_workers, **options)
        costs = {_number_of(each.rank): each.cost for each in decision.ranked}
        return _number_of(decision.rank), dict(sorted(costs.items()))

    def potential_loads(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Of each worker: prefill tokens, decode blocks."""
        return [
            (each.potential_prefill_tokens, each.potential_decode_blocks)
            for each in self.router.get_potential_loads(tokens)
        ]

    def reserve(self, request_id: str, tokens: Sequence[int], worker: int) -> None:
        """The request is load of a worker."""
        self.router.route(tokens, request_id=request_id, worker=name_of(worker))


def _number_of(rank: Rank) -> int:
    return int(rank.worker[1:])


def _options(asked: Asked) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if asked.weight is not None:
        options["override"] = RouterConfigOverride(overlap_score_weight=asked.weight)
    if asked.workers is not None:
        options["workers"] = [name_of(worker) for worker in asked.workers]
    if asked.required_taints:
        options["required_taints"] = asked.required_taints
    if asked.preferred_taints:
        options["preferred_taints"] = asked.preferred_taints
    return options


class Dynamo:
    """A SelectionService, `environment` being its settings; `start` it for each fleet."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [str(dynamo_python()), "-m", "tests.differential.dynamo"]
        self._side = Side("Dynamo", command, {**os.environ, **environment})
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def close(self) -> None:
        """End the process, and free the ports."""
        self._side.close()
        self._context.destroy(linger=0)

    def start(self, taints: Sequence[Collection[str]], block_size: int) -> None:
        """An empty service that follows new workers, from their first message on."""
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets = [self._context.socket(zmq.XPUB) for _ in taints]
        self._sent = [0] * len(taints)
        calls: list[list[Any]] = [["renew"]]
        for worker, (socket, mine) in enumerate(zip(self._sockets, taints, strict=True)):
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            calls.append(["upsert_worker", _worker(worker, mine, block_size, port)])
        self.ask(*calls)
        for socket in self._sockets:
            assert socket.poll(30_000), "Dynamo did not subscribe within 30 s"
            socket.recv()

    def publish(self, worker: int, payload: bytes) -> None:
        """A message of a worker."""
        number = self._sent[worker].to_bytes(8, "big")
        self._sockets[worker].send_multipart([b"", number, payload])
        self._sent[worker] += 1

    def ask(self, *calls: Sequence[Any]) -> list[Any]:
        """The answers to [method, *arguments] each; SystemExit if one is refused."""
        answers = self._side.measure([list(call) for call in calls])
        for call, answer in zip(calls, answers, strict=True):
            if isinstance(answer, dict) and "error" in answer:
                raise SystemExit(f"Dynamo refused {call[0]}: {answer['error']}")
        return answers

    def lengths(self, answer: dict[str, Any]) -> list[Lengths]:
        """Of each worker, of an answer of overlap_scores."""
        found = {
            each["worker_id"]: Lengths(
                each["device_blocks"], each["host_pinned_blocks"], each["disk_blocks"]
            )
            for each in answer["workers"]
        }
        return [found.get(worker, Lengths(0, 0, 0)) for worker in range(len(self._sockets))]


def _worker(worker: int, taints: Collection[str], block_size: int, port: int) -> dict[str, Any]:
    return {
        "worker_id": worker,
        "model_name": "m",
        "endpoint": f"http://127.0.0.1:{9000 + worker}",
        "block_size": block_size,
        "data_parallel_start_rank": 0,
        "data_parallel_size": 1,
        "max_num_batched_tokens": 8192,
        "total_kv_blocks": 100_000,
        "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
        "taints": sorted(taints),
    }


def request_of(tokens: Sequence[int], asked: Asked = Asked()) -> dict[str, Any]:
    """As Dynamo takes it."""
    request: dict[str, Any] = {"model_name": "m", "token_ids": list(tokens)}
    if asked.workers is not None:
        request["allowed_worker_ids"] = sorted(asked.workers)
    if asked.required_taints or asked.preferred_taints:
        request["routing_constraints"] = {
            "required_taints": sorted(asked.required_taints),
            "preferred_taints": dict(asked.preferred_taints),
        }
    return request


def payload_of(events: Sequence[Event]) -> bytes:
    """One message, for both."""
    return codec.encode(EventBatch(events=tuple(events), ts=1.5, dp_rank=0))
