"""kvplug: requests go to the worker that already holds their prefix in KV cache.

    >>> from kvplug import BlockStored, EventBatch, Rank, Router, RouterConfig
    >>> router = Router(RouterConfig(block_size=4))
    >>> router.add_worker("a"); router.add_worker("b")
    >>> stored = BlockStored(block_hashes=(71, 72), token_ids=tuple(range(8)), block_size=4)
    >>> router.apply(Rank("b"), EventBatch(events=(stored,))).num_stored
    2
    >>> decision = router.route(range(10))
    >>> str(decision.rank), decision.cached_tokens
    ('b', 8)

The names load on first use: `import kvplug` itself needs neither Numba nor a socket.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvplug._version import __version__

if TYPE_CHECKING:
    from kvplug.cluster.sync import ReplicaSync
    from kvplug.codec import decode, encode
    from kvplug.engines.kv_event_publisher import KvEventPublisher
    from kvplug.errors import (
        ConfigError,
        DecodeError,
        HashingError,
        IndexCorruptError,
        KvplugError,
        NoWorkerError,
        RoutingError,
        SharedMemoryError,
        SnapshotError,
        TokenizerError,
        TransportError,
        UnknownRankError,
        UnknownRequestError,
    )
    from kvplug.events import (
        AllBlocksCleared,
        BlockCopied,
        BlockRemoved,
        BlockStored,
        CxlMetadata,
        CxlState,
        CxlStateTransition,
        EventBatch,
        MoeLabel,
        Namespace,
        Rank,
        Tier,
    )
    from kvplug.forwarder.config import ZmqKvEventPublisherConfig
    from kvplug.hashing import BlockHasher
    from kvplug.index.apply_result import ApplyResult
    from kvplug.index.block_copies import BlockCopies
    from kvplug.index.block_index import BlockIndex
    from kvplug.index.bounds import Bounds
    from kvplug.index.prefix_query import Overlap, RankOverlap
    from kvplug.index.snapshot import restore as restore_snapshot
    from kvplug.index.snapshot import save as save_snapshot
    from kvplug.router.config import RouterConfig
    from kvplug.router.core import Router
    from kvplug.router.decider import Decision, RankCost
    from kvplug.router.engine_model import EngineModel
    from kvplug.router.matches import OverlapScores
    from kvplug.router.options import MoeQuery, RouterConfigOverride
    from kvplug.router.potential_loads import PotentialLoad

__all__ = [
    "AllBlocksCleared",
    "ApplyResult",
    "BlockCopied",
    "BlockCopies",
    "BlockHasher",
    "BlockIndex",
    "BlockRemoved",
    "BlockStored",
    "Bounds",
    "ConfigError",
    "CxlMetadata",
    "CxlState",
    "CxlStateTransition",
    "Decision",
    "DecodeError",
    "EngineModel",
    "EventBatch",
    "HashingError",
    "IndexCorruptError",
    "KvEventPublisher",
    "KvplugError",
    "MoeLabel",
    "MoeQuery",
    "Namespace",
    "NoWorkerError",
    "Overlap",
    "OverlapScores",
    "PotentialLoad",
    "Rank",
    "RankCost",
    "RankOverlap",
    "ReplicaSync",
    "RequestRefusedError",
    "Router",
    "RouterConfig",
    "RouterConfigOverride",
    "RoutingError",
    "SharedMemoryError",
    "SnapshotError",
    "Tier",
    "TokenizerError",
    "TransportError",
    "UnknownRankError",
    "UnknownRequestError",
    "WorkerLostError",
    "ZmqKvEventPublisherConfig",
    "__version__",
    "decode",
    "encode",
    "restore_snapshot",
    "save_snapshot",
]

_HOME_OF = {
    "AllBlocksCleared": "kvplug.events",
    "ApplyResult": "kvplug.index.apply_result",
    "BlockCopied": "kvplug.events",
    "BlockCopies": "kvplug.index.block_copies",
    "BlockHasher": "kvplug.hashing",
    "BlockIndex": "kvplug.index.block_index",
    "BlockRemoved": "kvplug.events",
    "BlockStored": "kvplug.events",
    "Bounds": "kvplug.index.bounds",
    "ConfigError": "kvplug.errors",
    "CxlMetadata": "kvplug.events",
    "CxlState": "kvplug.events",
    "CxlStateTransition": "kvplug.events",
    "Decision": "kvplug.router.decider",
    "DecodeError": "kvplug.errors",
    "EngineModel": "kvplug.router.engine_model",
    "EventBatch": "kvplug.events",
    "HashingError": "kvplug.errors",
    "IndexCorruptError": "kvplug.errors",
    "KvEventPublisher": "kvplug.engines.kv_event_publisher",
    "KvplugError": "kvplug.errors",
    "MoeLabel": "kvplug.events",
    "MoeQuery": "kvplug.router.options",
    "Namespace": "kvplug.events",
    "NoWorkerError": "kvplug.errors",
    "Overlap": "kvplug.index.prefix_query",
    "OverlapScores": "kvplug.router.matches",
    "PotentialLoad": "kvplug.router.potential_loads",
    "Rank": "kvplug.events",
    "RankCost": "kvplug.router.decider",
    "RankOverlap": "kvplug.index.prefix_query",
    "ReplicaSync": "kvplug.cluster.sync",
    "RequestRefusedError": "kvplug.errors",
    "Router": "kvplug.router.core",
    "RouterConfig": "kvplug.router.config",
    "RouterConfigOverride": "kvplug.router.options",
    "RoutingError": "kvplug.errors",
    "SharedMemoryError": "kvplug.errors",
    "SnapshotError": "kvplug.errors",
    "Tier": "kvplug.events",
    "TokenizerError": "kvplug.errors",
    "TransportError": "kvplug.errors",
    "UnknownRankError": "kvplug.errors",
    "UnknownRequestError": "kvplug.errors",
    "WorkerLostError": "kvplug.errors",
    "ZmqKvEventPublisherConfig": "kvplug.forwarder.config",
    "decode": "kvplug.codec",
    "encode": "kvplug.codec",
    "restore_snapshot": "kvplug.index.snapshot",
    "save_snapshot": "kvplug.index.snapshot",
}
# Where a name says less at home, as it is in a module of its own.
_NAME_AT_HOME = {"restore_snapshot": "restore", "save_snapshot": "save"}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kvplug' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), _NAME_AT_HOME.get(name, name))


def __dir__() -> list[str]:
    return __all__
