"""Moving event bytes. Knows no router and no index.

base    the contract
zmq     event publishers of vLLM, SGLang and kvplug, encrypted or not
nats    publishers over NATS, each by itself or in the stream of a fleet
memory  publishers in the same process
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from kvplug.curve_keys import ClientKeys
from kvplug.errors import TransportError
from kvplug.transports.base import Transport
from kvplug.transports.zmq import ZmqTransport

TransportFactory = Callable[[], Transport]

TRANSPORTS: Final[dict[str, TransportFactory]] = {
    "tcp": ZmqTransport,
    "ipc": ZmqTransport,
}
"""By the scheme of their endpoints, the transports that need no object of the caller's."""


def transports_with(keys: ClientKeys) -> dict[str, TransportFactory]:
    """The same, encrypted, and only to publishers whose public key is in `keys`."""
    encrypted = partial(ZmqTransport, keys=keys)
    return dict.fromkeys(TRANSPORTS, encrypted)


def scheme_of(endpoint: str, known: list[str]) -> str:
    """The part before "://"; TransportError if it is not one of the `known` schemes."""
    scheme, separator, _ = endpoint.partition("://")
    if separator and scheme in known:
        return scheme
    schemes = ", ".join(f"{each}://" for each in sorted(known))
    raise TransportError(
        f"cannot subscribe to events at {endpoint!r}: expected an endpoint like "
        f"tcp://127.0.0.1:5557, with one of the schemes {schemes}"
    )


def require_one_transport(
    events: str, replay: str, transports: Mapping[str, TransportFactory] = TRANSPORTS
) -> None:
    """TransportError unless one transport serves both endpoints: a source opens both."""
    known = list(transports)
    if transports[scheme_of(events, known)] is not transports[scheme_of(replay, known)]:
        raise TransportError(
            f"cannot follow events at {events!r} with replays from {replay!r}: "
            "expected endpoints of one transport"
        )
