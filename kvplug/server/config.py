"""ServerConfig: everything the standalone router is told, checked once.

In:  values from the command line.   Out: frozen objects, or a ConfigError in one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kvplug.errors import ConfigError
from kvplug.events import MAX_BLOCK_SIZE
from kvplug.router.config import RouterConfig
from kvplug.topics import Topic

_FORM = (
    "URL[,events=ENDPOINT][,replay=ENDPOINT][,topic=PREFIX][,block_size=N], like "
    "http://127.0.0.1:8100,events=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:6557"
)
_KEYS = ("events", "replay", "topic", "block_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One engine: where its API is, and where it publishes its KV events.

    Without `events` it publishes nowhere, or connects to the router's `events_bind`, where it is
    known by its topic, `kv@POD` or `kv@POD@MODEL`. `replay` is where it sends events again.

    block_size: its tokens per block; None: the router's, else what its events say.
    """

    url: str
    events: str | None = None
    topic: str = ""
    replay: str | None = None
    block_size: int | None = None

    @classmethod
    def parse(cls, text: str) -> WorkerSpec:
        """From `URL[,events=ENDPOINT][,replay=ENDPOINT][,topic=PREFIX][,block_size=N]`."""
        url, *settings = text.split(",")
        _require_http(url, text)
        values: dict[str, str] = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if key not in _KEYS or not equals or key in values:
                raise ConfigError(f"worker {text!r}: cannot read {setting!r}; expected {_FORM}")
            values[key] = value
        for key in {"events", "replay"} & values.keys():
            if "://" not in values[key]:
                raise ConfigError(f"worker {text!r}: {key}={values[key]!r}; expected {_FORM}")
        if "replay" in values and "events" not in values:
            raise ConfigError(f"worker {text!r}: replay= without events=; expected {_FORM}")
        return cls(
            url=url.rstrip("/"),
            events=values.get("events"),
            topic=values.get("topic", ""),
            replay=values.get("replay"),
            block_size=_block_size(values.get("block_size"), text),
        )


def _block_size(value: str | None, text: str) -> int | None:
    if value is None:
        return None
    if not (value.isdecimal() and 1 <= int(value) <= MAX_BLOCK_SIZE):
        limits = f"a whole number in [1, {MAX_BLOCK_SIZE}]"
        raise ConfigError(f"worker {text!r}: block_size={value!r}; expected {limits}")
    return int(value)


def _require_http(url: str, text: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"worker {text!r}: {url!r} is no http URL; expected {_FORM}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the standalone router serves.

    workers: the engines. tokenizer: folder with tokenizer.json and chat template; by default the
    folder that a worker names for its model, if it is on this machine.
    worker_api_key_file: holds the key of workers that demand one (vLLM's --api-key), for what the
    router asks on its own; clients send theirs.
    events_bind: endpoint that engines connect to with their events; None: none does.
    max_body_bytes: a larger request body is answered with 413.
    health_interval_s: between two looks at a worker. connect_timeout_s: to reach a worker.
    request_timeout_s: longest silence of a worker within a request.
    client_timeout_s: for a request to arrive whole, and for an idle connection to be used again.
    max_connections: of clients at once; None: as many as there are descriptors for.
    grace_s: how long requests in flight may take to end when the router stops.
    audit_sample: share of the requests whose predicted cached tokens are compared with the answer.
    """

    workers: tuple[WorkerSpec, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    router: RouterConfig = field(default_factory=RouterConfig)
    tokenizer: Path | None = None
    worker_api_key_file: Path | None = None
    events_bind: str | None = None
    max_body_bytes: int = 32 * 2**20
    health_interval_s: float = 2.0
    connect_timeout_s: float = 5.0
    request_timeout_s: float = 600.0
    client_timeout_s: float = 60.0
    max_connections: int | None = None
    grace_s: float = 10.0
    audit_sample: float = 1.0

    def __post_init__(self) -> None:
        if not self.workers:
            raise ConfigError(f"no workers: name at least one with --worker {_FORM}")
        for name in ("url", "events", "replay"):
            self._require_distinct(name)
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        if self.tokenizer is not None and not self.tokenizer.is_dir():
            raise ConfigError(f"tokenizer: expected a folder, {str(self.tokenizer)!r} is none")
        _ = self.worker_api_key  # checks itself
        if not 0 <= self.audit_sample <= 1:
            raise ConfigError(f"audit_sample must be in [0, 1], got {self.audit_sample}")
        self._require_topics()
        # aiohttp takes a grace of 0 for no limit at all.
        times = ("health_interval_s", "connect_timeout_s", "request_timeout_s", "grace_s")
        for name in (*times, "client_timeout_s", "max_connections", "max_body_bytes"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")

    @property
    def worker_api_key(self) -> str | None:
        """Read anew each time, as it is not to be kept where it could be printed."""
        if self.worker_api_key_file is None:
            return None
        try:
            key = self.worker_api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"worker_api_key_file: cannot be read: {error}") from error
        if not (key.isascii() and key.isprintable() and key):
            raise ConfigError(
                f"worker_api_key_file: expected a line of printable ASCII characters in "
                f"{str(self.worker_api_key_file)!r}, got none or others"
            )
        return key

    def _require_distinct(self, name: str) -> None:
        """Two engines never share an address; a copied one would mix their blocks."""
        seen: dict[str, WorkerSpec] = {}
        for worker in self.workers:
            address = getattr(worker, name)
            # Publishers that share an endpoint are told apart by their topics.
            if address is None or (name == "events" and worker.topic):
                continue
            if address in seen and name == "url":
                raise ConfigError(f"worker {address!r} is named twice")
            if address in seen:
                raise ConfigError(
                    f"workers {seen[address].url!r} and {worker.url!r} have the same "
                    f"{name}={address}; expected an endpoint of its own for each"
                )
            seen[address] = worker

    def _require_topics(self) -> None:
        if self.events_bind is None:
            return
        if "://" not in self.events_bind:
            raise ConfigError(
                f"events_bind: expected an endpoint like tcp://*:5557, got {self.events_bind!r}"
            )
        for worker in self.workers:
            if worker.events is None and worker.topic and Topic.parse(worker.topic) is None:
                raise ConfigError(
                    f"worker {worker.url!r} shares a socket with others: expected a topic like "
                    f"kv@POD or kv@POD@MODEL, got {worker.topic!r}"
                )
