"""Where the API is of a worker that was named by its event endpoint: its hello says so.

In:  the last hello of its publisher, the endpoint that it came from.
Out: a URL; ValueError with what to do while there is none.

A hello decides where requests go, so it counts only over an endpoint that the operator named.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import SplitResult, urlsplit

from kvplug.protocol import WorkerHello
from kvplug.server.workers.hosts import host_of, in_brackets, is_loopback, is_wildcard

_SET: Final = "set KVPLUG_WORKER_URL at the engine, or give its --worker as URL,events=ENDPOINT"
_SILENT: Final = (
    "nothing has come from its event endpoint yet, which would say where its API is; none needed "
    "if the engine is about to start: the endpoint is tried again by itself. If it "
    "runs, its publisher is another one, or requires keys (--events-key-file)"
)
_UNREADABLE: Final = (
    "nothing that its publisher says can be read; install the same release of kvplug in the engine "
    "and the router"
)
_STOCK: Final = (
    "its publisher is a stock one, which does not say where its API is; give its --worker as "
    "URL,events=ENDPOINT, or start the engine with kvplug's plug-in"
)


def url_said(
    about: WorkerHello | None, endpoint: str, *, has_spoken: bool, is_ours: bool = True
) -> str:
    """`has_spoken`: whether the publisher has sent anything; `is_ours`: on kvplug's own wire."""
    if about is None:
        raise ValueError((_UNREADABLE if is_ours else _STOCK) if has_spoken else _SILENT)
    if not about.url:
        raise ValueError(f"its hello does not say where its API is; {_SET}")
    if "@" in about.url:
        raise ValueError(f"its hello says a URL with an @, which may hold a password; {_SET}")
    parts = _split(about.url)
    if parts is None or parts.hostname is None:
        raise ValueError(f"its hello says {about.url!r}, which is no http URL; {_SET}")
    at = host_of(endpoint)
    if is_wildcard(parts.hostname):
        return _with_host(parts, at)
    if is_loopback(parts.hostname) and not is_loopback(at):
        raise ValueError(f"its hello says {about.url}, which only its machine reaches; {_SET}")
    return about.url.rstrip("/")


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        is_usable = url.isprintable() and " " not in url and parts.scheme in ("http", "https")
        is_usable = is_usable and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if is_usable else None


def _with_host(parts: SplitResult, host: str) -> str:
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{in_brackets(host)}{port}{parts.path.rstrip('/')}"
