"""What callers give: checked where it enters, so that a slip is named and nothing has changed.

In:  arguments of Router.   Out: the same; ConfigError in one sentence for what cannot be meant.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, TypeVar

from kvplug.errors import ConfigError
from kvplug.events import EventBatch, Rank
from kvplug.setting import shown

_T = TypeVar("_T")

MAX_BLOCKS: Final = 2**40
"""Of a cache, and requests and tokens that an engine reports: more is a mistake, and what the
kernels can count with.
"""


def checked_worker(name: str) -> str:
    """The name of a worker: a text, not empty."""
    return _checked(name, str, "the name of a worker", is_right=bool(name))


def checked_rank(rank: Rank) -> Rank:
    """A Rank with a name and a number."""
    is_right = type(rank) is Rank and type(rank.worker) is str and type(rank.dp_rank) is int
    return _checked(rank, Rank, "a rank", is_right=is_right)


def checked_batch(batch: EventBatch) -> EventBatch:
    """An EventBatch of a tuple or list of events."""
    is_right = isinstance(batch, EventBatch) and isinstance(batch.events, tuple | list)
    return _checked(batch, EventBatch, "events", is_right=is_right)


def checked_id(request_id: str) -> str:
    """The id of a request: a text, not empty. A Decision is none, but has one."""
    return _checked(request_id, str, "a request id", is_right=request_id != "")


def checked_pools(pool_ids: Collection[int]) -> Collection[int]:
    """Ids of CXL pools: whole numbers."""
    is_right = isinstance(pool_ids, Collection) and all(type(each) is int for each in pool_ids)
    if not is_right or isinstance(pool_ids, str | bytes):
        raise ConfigError(f"expected ids of CXL pools, a list of int, got {shown(pool_ids)}")
    return pool_ids


def checked_instance(value: _T, type_: type, what: str) -> _T:
    """An object of that type."""
    return _checked(value, type_, what, is_right=True)


def _checked(value: _T, type_: type, what: str, *, is_right: bool) -> _T:
    if isinstance(value, type_) and is_right:
        return value
    article = "an" if type_.__name__[0] in "AEIOU" else "a"
    some = "a str that is not empty" if type_ is str else f"{article} {type_.__name__}"
    raise ConfigError(f"expected {what} to be {some}, got {shown(value)}")
