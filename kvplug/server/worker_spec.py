"""WorkerSpec: one engine, as `--worker` names it.

In:  a text.   Out: where its API is and where its events come from, or ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from kvplug.errors import ConfigError, TransportError
from kvplug.events import MAX_BLOCK_SIZE, MAX_DP_SIZE
from kvplug.transports import TRANSPORTS, require_one_transport

FORM: Final = (
    "ADDRESS[,events=ENDPOINT][,replay=ENDPOINT][,topic=PREFIX][,block_size=N][,dp_size=N]"
)
EXAMPLES: Final = (
    f"{FORM}, like http://127.0.0.1:8100, tcp://127.0.0.1:5557 or "
    "http://127.0.0.1:8100,events=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:6557"
)
OVER_NATS: Final = "nats"
"""For an endpoint of events: they come over the router's NATS servers."""
_UNIX: Final = "unix:"
_MAX_SOCKET_PATH_BYTES: Final = 107  # Linux: sockaddr_un
_KEYS: Final = ("events", "replay", "topic", "block_size", "dp_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One engine: where its API is, or where it publishes its KV events, or both.

    Without `events`, the engine is asked where it publishes; with a topic `kv@POD` or
    `kv@POD@MODEL` it connects to the router's `events_bind`. `nats`: over the router's NATS
    servers, under its URL, or under `topic` if it has another name there. Without `url`, its
    publisher says where its API is. `replay` is where it sends events again. Endpoints are those
    of data-parallel rank 0; the other ranks have the ports above. ConfigError with neither.

    block_size: its tokens per block; None: the router's, else what its events say.
    dp_size: its data-parallel ranks; None: what the engine says, else 1.
    """

    url: str | None = None
    events: str | None = None
    topic: str = ""
    replay: str | None = None
    block_size: int | None = None
    dp_size: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a worker needs a url or an events endpoint")

    @property
    def name(self) -> str:
        """What it is called, from the start: its URL, or else its event endpoint."""
        return self.url or self.events or ""

    @property
    def text(self) -> str:
        """In the form that `--worker` has."""
        keys = _KEYS if self.url is not None else _KEYS[1:]  # events is its address then
        parts = [(key, getattr(self, key)) for key in keys]
        given = [f"{key}={value}" for key, value in parts if value not in (None, "")]
        return ",".join([self.name, *given])

    @classmethod
    def parse(cls, text: str) -> WorkerSpec:
        """From the form that `--worker` has; ConfigError."""
        address, *settings = text.split(",")
        is_endpoint = address.partition("://")[0] in TRANSPORTS
        values: dict[str, str] = {"events": address} if is_endpoint else {}
        if not is_endpoint:
            _require_address(address, text)
        for part in settings:
            key, equals, value = part.partition("=")
            if key not in _KEYS or not equals or key in values:
                raise ConfigError(f"worker {text!r}: cannot read {part!r}; expected {EXAMPLES}")
            values[key] = value
        _check_endpoints(values, text)
        return cls(
            url=None if is_endpoint else address.rstrip("/"),
            events=values.get("events"),
            topic=values.get("topic", ""),
            replay=values.get("replay"),
            block_size=_whole(values, "block_size", MAX_BLOCK_SIZE, text),
            dp_size=_whole(values, "dp_size", MAX_DP_SIZE, text),
        )


def _check_endpoints(values: Mapping[str, str], text: str) -> None:
    for key in {"events", "replay"} & values.keys():
        if "://" not in values[key] and (key, values[key]) != ("events", OVER_NATS):
            raise ConfigError(f"worker {text!r}: {key}={values[key]!r}; expected {EXAMPLES}")
    if "replay" not in values:
        return
    if "events" not in values:
        raise ConfigError(f"worker {text!r}: replay= without events=; expected {EXAMPLES}")
    if values["events"] == OVER_NATS:
        raise ConfigError(f"worker {text!r}: replay= with events=nats, which needs none")
    _require_one_transport(values["events"], values["replay"], text)


def _whole(values: Mapping[str, str], key: str, largest: int, text: str) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    if not (value.isdecimal() and 1 <= int(value) <= largest):
        limits = f"a whole number in [1, {largest}]"
        raise ConfigError(f"worker {text!r}: {key}={value!r}; expected {limits}")
    return int(value)


def _require_one_transport(events: str, replay: str, text: str) -> None:
    try:
        require_one_transport(events, replay)
    except TransportError as error:
        raise ConfigError(f"worker {text!r}: {error}") from error


def socket_of(url: str) -> str | None:
    """The path of the Unix socket that a worker's URL names; None for others."""
    return url.removeprefix(_UNIX) if url.startswith(_UNIX) else None


def _require_address(url: str, text: str) -> None:
    if (path := socket_of(url)) is not None:
        if not path.startswith("/") or len(path.encode()) > _MAX_SOCKET_PATH_BYTES:
            limit = f"an absolute path of at most {_MAX_SOCKET_PATH_BYTES} bytes"
            raise ConfigError(f"worker {text!r}: behind unix: is not {limit}; expected {EXAMPLES}")
        return
    names_user = False
    try:
        parts = urlsplit(url)
        names_user = "@" in parts.netloc
        # urlsplit drops line breaks and keeps spaces, which would both break a line of a request.
        usable = url.isprintable() and " " not in url and parts.scheme in ("http", "https")
        usable = usable and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    # A password may hold any character, also one with which the rest is no URL. A topic has an @.
    if names_user or (not usable and "@" in text.partition("=")[0]):
        raise ConfigError(
            "a worker's URL may not name a user or a password, which logs and metrics would show: "
            "expected http://HOST:PORT and the engine's key in a file, --worker-api-key-file"
        )
    if not usable:
        raise ConfigError(
            f"worker {text!r}: {url!r} is no http URL, no unix:/path and no event endpoint; "
            f"expected {EXAMPLES}"
        )
