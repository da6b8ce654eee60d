"""Hosts in URLs and endpoints: who can reach them.

In:  a host, as a URL or an endpoint writes it.   Out: whether it is every address, or this machine.
"""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address
from typing import Final

_WILDCARDS: Final = frozenset({"*", "0.0.0.0", "::"})


def is_wildcard(host: str) -> bool:
    """Whether a socket that is bound to it has every address of its machine."""
    return _bare(host) in _WILDCARDS


def is_loopback(host: str) -> bool:
    """Whether only its own machine reaches it."""
    with suppress(ValueError):
        return ip_address(_bare(host)).is_loopback
    return host == "localhost"


def in_brackets(host: str) -> str:
    """As it stands before a port."""
    bare = _bare(host)
    return f"[{bare}]" if ":" in bare else bare


def host_of(endpoint: str) -> str:
    """Of an endpoint; the loopback address for one that has no host, as `ipc://`."""
    scheme, _, address = endpoint.partition("://")
    return _bare(address.rpartition(":")[0]) if scheme == "tcp" else "127.0.0.1"


def _bare(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")
