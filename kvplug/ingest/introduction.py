"""What a publisher of ours says of its engine, to the router.

In:  the `about` of a hello.   Out: calls of the router; the reason why its events are of no use.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from kvplug.errors import ConfigError, UnknownRankError
from kvplug.events import Rank
from kvplug.index.apply_result import RejectReason
from kvplug.protocol import HASH_SCHEME, WorkerHello
from kvplug.router.core import Router

HASH_SCHEME_REASON: Final = "hash_scheme"
"""Its sequence hashes are computed in another way than the router's."""

OTHER_RANK: Final = "other_rank"
"""Why messages are refused that name another data-parallel rank than the publisher has."""

_MAX_REASON_LENGTH: Final = 40


def introduce(
    router: Router, rank: Rank, about: WorkerHello, engine_rank: int | None
) -> str | None:
    """Tell the router of the rank's engine; returns why its events are refused, None: they are not.

    `engine_rank`: the data-parallel rank that the publisher must have, if any. What cannot be, but
    does no harm, is passed over.
    """
    if about.hash_scheme != HASH_SCHEME:
        return HASH_SCHEME_REASON
    if engine_rank is not None and about.dp_rank != engine_rank:
        return OTHER_RANK
    try:
        if not _set_blocks(router, rank, about):
            return RejectReason.BLOCK_SIZE.value
        with suppress(ConfigError):
            router.set_cxl_pools(rank.worker, about.cxl_pools)
        if about.capacity_blocks is not None:
            router.set_cache_capacity(rank, about.capacity_blocks)
    except UnknownRankError:
        return RejectReason.UNKNOWN_RANK.value
    return None


def _set_blocks(router: Router, rank: Rank, about: WorkerHello) -> bool:
    if about.block_size is None:
        return True
    try:
        return router.set_blocks(rank, about.block_size, bigrams=about.bigrams)
    except ConfigError:  # it is no block size
        return False


def has_other_blocks(former: WorkerHello | None, about: WorkerHello) -> bool:
    """Whether what is known of the former blocks is of no use any more, or is another rank's."""
    if former is None:
        return False
    is_other_rank = former.dp_rank != about.dp_rank
    is_known = former.block_size is not None
    is_other_kind = (former.block_size, former.bigrams) != (about.block_size, about.bigrams)
    return is_other_rank or (is_known and is_other_kind)


def defect_of(about: WorkerHello) -> str | None:
    """Why the publisher's events do not say all: the first reason, fit for a log."""
    for reason in about.defects:
        return "".join(filter(str.isprintable, reason[:_MAX_REASON_LENGTH]))
    return None


def summary_of(about: WorkerHello) -> str:
    """What a hello is refused for, in the log."""
    return (
        f"it says block_size={about.block_size}, bigrams={about.bigrams}, "
        f"hash_scheme={about.hash_scheme!r:.40}, dp_rank={about.dp_rank};"
    )
