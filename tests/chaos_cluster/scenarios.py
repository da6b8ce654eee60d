"""Every fault, as a sentence of orders to a rig.

In:  a rig whose replicas trust what they know, engines at work.   Out: the fault is over.
"""

import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from tests.chaos_cluster.rig import Outcome, Rig

# Longer than a publisher's silence that is noticed (4 s), and than the lease on snapshots (10 s).
SILENCE_S, LEASE_S = 8.0, 14.0
BURST = 400
# Of a snapshot: kvplug/cluster/checkpoints.py.
STEPS = ("lease", "freeze", "upload", "manifest", "purge", "collect")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """nodes: of how many servers; needs_disk: whether the server needs a small disk of its own."""

    name: str
    act: Callable[[Rig], None]
    nodes: int = 1
    needs_disk: bool = False

    def run(self, rig) -> Outcome:
        rig.begin_exact()
        self.act(rig)
        return rig.settle()


def _nothing(rig):
    rig.last(2.0)


# -- servers --


def _server_killed(rig):
    """SIGKILL in the middle of writing, twice."""
    node = rig.servers.nodes[0]
    for pause_s in (0.0, 2.0):
        rig.last(pause_s)
        with rig.at_work(BURST):
            node.kill()
        node.start()


def _server_away(rig):
    node = rig.servers.nodes[0]
    node.kill()
    rig.last(SILENCE_S)
    node.start()


def _server_paused(rig):
    node = rig.servers.nodes[0]
    node.pause()
    rig.last(SILENCE_S)
    node.resume()


def _rolled_back(rig):
    """What was acknowledged meanwhile is gone, and its numbers are given again."""
    rig.servers.save()
    rig.last(2.0)
    rig.work(BURST)
    rig.servers.bring_back()


def _disk_full(rig):
    rig.servers.fill_disk()
    rig.last(SILENCE_S)
    rig.work(BURST)
    rig.servers.free_disk()
    rig.servers.nodes[0].stop()
    rig.servers.nodes[0].start()


def _node_killed(rig):
    """One of three that does not lead the stream."""
    leader = rig.operator.leader()
    node = next(node for node in rig.servers.nodes if node.name != leader)
    _kill_for(rig, node)


def _leader_killed(rig):
    leader = rig.operator.leader()
    _kill_for(rig, next(node for node in rig.servers.nodes if node.name == leader))


def _kill_for(rig, node):
    with rig.at_work(BURST):
        node.kill()
    rig.last(SILENCE_S)
    node.start()


def _leader_paused(rig):
    leader = rig.operator.leader()
    node = next(node for node in rig.servers.nodes if node.name == leader)
    node.pause()
    rig.last(SILENCE_S)
    node.resume()


def _no_quorum(rig):
    """Two of three."""
    for node in rig.servers.nodes[:2]:
        node.kill()
    rig.last(SILENCE_S)
    for node in rig.servers.nodes[:2]:
        node.start(wait=False)
    for node in rig.servers.nodes[:2]:
        node.await_ready()


# -- replicas --


def _replica_killed(rig):
    rig.restart(rig.replicas["b"])


def _all_killed(rig):
    """One starts when none is left, the others later."""
    for each in rig.replicas.values():
        each.kill()
    rig.last(1.0)
    for each in rig.replicas.values():
        each.start()
        each.wait_ready()


def _replica_paused(rig):
    rig.replicas["a"].pause()
    rig.last(LEASE_S)
    rig.replicas["a"].resume()


def _replica_stalled(rig):
    """Nothing gets through, and nobody says so."""
    rig.replicas["b"].stall()
    rig.last(LEASE_S)
    rig.replicas["b"].restore()


def _replica_cut(rig):
    rig.replicas["c"].cut()
    rig.last(SILENCE_S)
    rig.replicas["c"].restore()


def _slow_consumer(rig):
    """The server has more for it than it keeps (max_pending), and cuts it off."""
    rig.replicas["a"].pause()
    rig.work(10 * BURST)
    rig.last(2.0)
    rig.replicas["a"].resume()


# -- engines --


def _engine_killed(rig):
    engine = next(iter(rig.engines.values()))
    engine.kill()
    rig.last(SILENCE_S)
    engine.start()
    engine.wait_ready()
    engine.work(20)


def _engine_stalled(rig):
    engine = next(iter(rig.engines.values()))
    for way in engine.ways:
        way.stall()
    rig.last(SILENCE_S)
    engine.work(BURST)
    for way in engine.ways:
        way.restore()


def _namesakes(rig):
    """Another engine of its name starts; then the first one is stopped."""
    name, engine = next(iter(rig.engines.items()))
    other = rig.new_engine(f"{name}-again", url=engine.url)
    other.start()
    other.wait_ready()
    rig.speaking[name] = other
    other.work(20)
    other.begin_work()
    rig.last(SILENCE_S)
    engine.kill()
    rig.engines[name] = other


# -- the stream and what is kept --


def _purged(rig):
    """While a replica is away."""
    rig.replicas["b"].cut()
    rig.work(BURST)
    rig.operator.purge()
    rig.replicas["b"].restore()


def _stream_deleted(rig):
    rig.operator.delete_stream()
    rig.last(1.0)


def _consumers_deleted(rig):
    rig.operator.delete_consumers()
    rig.last(1.0)


def _retention_of_seconds(rig):
    """A replica is away for longer than anything is kept."""
    rig.operator.keep_for(2)
    rig.replicas["c"].stall()
    rig.last(SILENCE_S)
    rig.replicas["c"].restore()
    rig.restart(rig.replicas["a"])
    rig.operator.keep_for(3600)


def _damaged(damage):
    def act(rig):
        await_snapshot(rig)
        for each in rig.replicas.values():
            each.kill()
        damage(rig.operator)
        for each in rig.replicas.values():
            each.start()
        for each in rig.replicas.values():
            each.wait_ready()

    return act


def await_snapshot(rig):
    """Work until there is another one than now."""
    before = rig.operator.manifest()
    for _ in range(60):
        rig.work(BURST // 4)
        rig.last(0.5)
        if rig.operator.manifest() != before:
            return
    raise AssertionError("no snapshot was made")


def _holder_killed(rig):
    """In each step of a snapshot, whoever makes it."""
    for step in STEPS:
        for each in rig.replicas.values():
            each.arm(step, signal.SIGKILL)
        holder = rig.await_replica(lambda each: each.is_dead, f"one dies at its {step}")
        for each in rig.replicas.values():
            if each is not holder:
                each.arm(None, signal.SIGCONT)
        rig.restart(holder)


def _holder_paused(rig):
    """The same for longer than its lease; then it goes on as if nothing had been."""
    for step in STEPS:
        for each in rig.replicas.values():
            each.arm(step, signal.SIGSTOP)
        holder = rig.await_replica(lambda each: each.is_stopped, f"one stops at its {step}")
        holder.is_paused = True
        for each in rig.replicas.values():
            if each is not holder:
                each.is_paused = each.is_stopped  # it took over, and came to its step, too
                each.resume()
                each.arm(None, signal.SIGCONT)
        rig.last(LEASE_S)
        holder.resume()


def _states_reset(rig):
    """One replica starts with nothing and makes the others do so, too."""
    replica = rig.replicas["b"]
    replica.kill()
    replica.start("--router-reset-states")
    replica.wait_ready()


# -- everything --


def _everything(rig):
    """Whatever the seed says, one after the other, without a pause."""
    random = Random(rig.seed)
    orders = [
        _server_killed,
        _server_paused,
        _rolled_back,
        _replica_killed,
        _replica_paused,
        _replica_stalled,
        _replica_cut,
        _engine_stalled,
        _purged,
        _stream_deleted,
        _consumers_deleted,
    ]
    random.shuffle(orders)
    for order in orders[:8]:
        order(rig)


def _everything_of_three(rig):
    random = Random(rig.seed)
    orders = [
        _node_killed,
        _leader_killed,
        _leader_paused,
        _replica_killed,
        _replica_stalled,
        _engine_stalled,
        _purged,
        _consumers_deleted,
    ]
    random.shuffle(orders)
    for order in orders[:6]:
        with suppress(StopIteration):
            order(rig)


SCENARIOS = (
    Scenario(name="no fault", act=_nothing),
    Scenario(name="server killed", act=_server_killed),
    Scenario(name="server away", act=_server_away),
    Scenario(name="server paused", act=_server_paused),
    Scenario(name="server rolled back", act=_rolled_back),
    Scenario(name="disk full", act=_disk_full, needs_disk=True),
    Scenario(name="replica killed", act=_replica_killed),
    Scenario(name="all replicas killed", act=_all_killed),
    Scenario(name="replica paused", act=_replica_paused),
    Scenario(name="replica partitioned", act=_replica_stalled),
    Scenario(name="replica cut off", act=_replica_cut),
    Scenario(name="slow consumer", act=_slow_consumer),
    Scenario(name="engine killed", act=_engine_killed),
    Scenario(name="engine partitioned", act=_engine_stalled),
    Scenario(name="two engines of one name", act=_namesakes),
    Scenario(name="stream purged", act=_purged),
    Scenario(name="stream deleted", act=_stream_deleted),
    Scenario(name="consumers deleted", act=_consumers_deleted),
    Scenario(name="retention of 2 s", act=_retention_of_seconds),
    Scenario(name="snapshot lost a chunk", act=_damaged(lambda operator: operator.delete_chunk())),
    Scenario(name="snapshot changed", act=_damaged(lambda operator: operator.change_bytes())),
    Scenario(name="manifest deleted", act=_damaged(lambda operator: operator.delete_manifest())),
    Scenario(name="states reset", act=_states_reset),
    Scenario(name="holder killed in its snapshot", act=_holder_killed),
    Scenario(name="holder paused in its snapshot", act=_holder_paused),
    Scenario(name="everything", act=_everything),
    Scenario(name="one node of three killed", act=_node_killed, nodes=3),
    Scenario(name="leader killed", act=_leader_killed, nodes=3),
    Scenario(name="leader paused", act=_leader_paused, nodes=3),
    Scenario(name="two nodes of three killed", act=_no_quorum, nodes=3),
    Scenario(name="everything, three nodes", act=_everything_of_three, nodes=3),
)


def scenarios(names):
    """Those of the names, in the order of SCENARIOS; KeyError if there is none of a name."""
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    return sorted((by_name[name] for name in names), key=SCENARIOS.index)
