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
    from kvplug.errors import KvplugError
    from kvplug.events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        EventBatch,
        Namespace,
        Rank,
        Tier,
    )
    from kvplug.index.block_index import BlockIndex
    from kvplug.router.config import RouterConfig
    from kvplug.router.core import Router
    from kvplug.router.decider import Decision
    from kvplug.router.engine_model import EngineModel
    from kvplug.router.options import MoeQuery, RouterConfigOverride

__all__ = [
    "AllBlocksCleared",
    "BlockIndex",
    "BlockRemoved",
    "BlockStored",
    "Decision",
    "EngineModel",
    "EventBatch",
    "KvplugError",
    "MoeQuery",
    "Namespace",
    "Rank",
    "Router",
    "RouterConfig",
    "RouterConfigOverride",
    "Tier",
    "__version__",
]

_HOME_OF = {
    "AllBlocksCleared": "kvplug.events",
    "BlockIndex": "kvplug.index.block_index",
    "BlockRemoved": "kvplug.events",
    "BlockStored": "kvplug.events",
    "Decision": "kvplug.router.decider",
    "EngineModel": "kvplug.router.engine_model",
    "EventBatch": "kvplug.events",
    "KvplugError": "kvplug.errors",
    "MoeQuery": "kvplug.router.options",
    "Namespace": "kvplug.events",
    "Rank": "kvplug.events",
    "Router": "kvplug.router.core",
    "RouterConfig": "kvplug.router.config",
    "RouterConfigOverride": "kvplug.router.options",
    "Tier": "kvplug.events",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kvplug' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
