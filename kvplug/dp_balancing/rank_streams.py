"""Where the data-parallel ranks of one engine publish their events, as its front end finds them.

In:  what the engine says of a rank's publisher.
Out: a RankStream; ConfigError for one that cannot be followed from here.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import msgspec

from kvplug.engines.binding import local_endpoint
from kvplug.errors import ConfigError

_ONLY_HERE: Final = ("127.", "localhost", "[::1]", "*", "0.0.0.0", "[::]")


class RankStream(msgspec.Struct, frozen=True, kw_only=True):
    """engine_rank: what its messages call the rank; replay: where it is asked for past ones."""

    engine_rank: int
    events: str
    replay: str | None = None
    topic: str = ""


def rank_stream(
    engine_rank: int, endpoint: str, replay: str | None, topic: str, *, is_local: bool
) -> RankStream:
    """`is_local`: whether the rank runs on this machine."""
    events = _found(endpoint, is_local)
    if events is None:
        raise ConfigError(
            f"expected an endpoint of rank {engine_rank} that is reached from here, got "
            f"{endpoint}{'' if is_local else ' on another machine'}"
        )
    asks = None if replay is None else _found(replay, is_local)
    return RankStream(engine_rank=engine_rank, events=events, replay=asks, topic=topic)


def _found(endpoint: str, is_local: bool) -> str | None:
    if is_local:
        return local_endpoint(endpoint)
    host = urlsplit(endpoint).netloc
    is_elsewhere = endpoint.startswith("tcp://") and not host.startswith(_ONLY_HERE)
    return endpoint if is_elsewhere else None
