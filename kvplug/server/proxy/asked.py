"""A request as the proxy gets it.

In:  what the API has read of it.   Out: Forward.
"""

from __future__ import annotations

from typing import NamedTuple

from kvplug.events import Namespace
from kvplug.hashing import Tokens
from kvplug.server.proxy.additions import NO_ADDITIONS, Additions
from kvplug.server.proxy.continuation import Continuation


class Forward(NamedTuple):
    """What to send on: the raw body, and what the router knows of it.

    unknown_because: why `tokens` are None or not all of the prompt's; None if they are all.
    max_tokens: how long the answer may get; streams: whether it comes token by token.
    unauditable: why the answer's usage would not tell about the prefix, or None. session, worker:
    what the request belongs to, and the only worker that it may go to, if the mode asks for it.
    additions: what the router asks for besides; continuation: of a stream that can go on elsewhere.
    """

    model: str
    body: bytes
    tokens: Tokens | None
    namespace: Namespace
    max_tokens: int | None
    streams: bool
    unauditable: str | None
    session: str = ""
    worker: str = ""
    additions: Additions = NO_ADDITIONS
    continuation: Continuation | None = None
    unknown_because: str | None = None
