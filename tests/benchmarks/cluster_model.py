"""What a fleet asks of servers and replicas, on paper: products of rates and measured costs.

In:  Fleet, Costs.   Out: Demand, of events in the stream, or that go to each replica directly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

BEATS_PER_S = 0.5
_HOUR_S = 3600


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A busy rank tells of 100 events a second, in a message for each of 20 steps: half of the
    events store 16 blocks, half remove 16. Those are 12,800 new tokens a second.
    """

    num_ranks: int
    num_replicas: int
    messages_per_s: float = 20.0
    num_copies: int = 3

    @property
    def all_messages_per_s(self) -> float:
        """Of all ranks."""
        return self.num_ranks * self.messages_per_s

    @property
    def beats_per_s(self) -> float:
        """Of all ranks."""
        return self.num_ranks * BEATS_PER_S


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one message costs, in CPU us by the rate of all messages: what comes faster is taken
    together, so it costs less. {rate a second: us}

    store: the servers together, to keep it; consumer: them, to hand it to one replica; replica, and
    direct over ZMQ: the replica, to receive and apply it. message_bytes: in the stream.
    """

    store: dict[float, float] = field(default_factory=dict)
    consumer: dict[float, float] = field(default_factory=dict)
    replica: dict[float, float] = field(default_factory=dict)
    direct: dict[float, float] = field(default_factory=dict)
    message_bytes: float = 0.0
    beat_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Into and out of the servers, kept an hour on all their disks, and cores."""

    messages_per_s: float
    in_mb_s: float
    out_mb_s: float
    kept_gb: float
    server_cores: float
    replica_cores: float


def at(cost: dict[float, float], rate: float) -> float:
    """Between measured rates by their logarithm, beyond them as at the nearest one."""
    rates = sorted(cost)
    return float(np.interp(math.log(rate), np.log(rates), [cost[each] for each in rates]))


def of_stream(fleet: Fleet, costs: Costs) -> Demand:
    """A beat is counted as a message that is handed over, and not kept."""
    rate, beats = fleet.all_messages_per_s, fleet.beats_per_s
    kept, said = rate * costs.message_bytes, rate * costs.message_bytes + beats * costs.beat_bytes
    handed_us = (rate + beats) * at(costs.consumer, rate) * fleet.num_replicas
    return Demand(
        messages_per_s=rate + beats,
        in_mb_s=said / 1e6,
        out_mb_s=said * fleet.num_replicas / 1e6,
        kept_gb=kept * _HOUR_S * fleet.num_copies / 1e9,
        server_cores=(rate * at(costs.store, rate) + handed_us) / 1e6,
        replica_cores=(rate + beats) * at(costs.replica, rate) / 1e6,
    )


def of_direct(fleet: Fleet, costs: Costs, snapshot_bytes: float) -> Demand:
    """Only a snapshot every half an hour goes over the servers, and is read back; load between the
    replicas is not counted here, as it follows requests and not ranks.
    """
    rate, beats = fleet.all_messages_per_s, fleet.beats_per_s
    snapshots = snapshot_bytes * 2 / _HOUR_S / 1e6
    return Demand(
        messages_per_s=0.0,
        in_mb_s=snapshots,
        out_mb_s=snapshots,
        kept_gb=2 * snapshot_bytes * fleet.num_copies / 1e9,
        server_cores=0.0,
        replica_cores=(rate + beats) * at(costs.direct, rate) / 1e6,
    )
