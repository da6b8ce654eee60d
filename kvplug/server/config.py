"""ServerConfig: everything the standalone router is told, checked once.

In:  values from the command line.   Out: frozen objects, or a ConfigError in one sentence.
"""

from __future__ import annotations

import grp
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvplug.curve_keys import ClientKeys
from kvplug.errors import ConfigError
from kvplug.router.config import RouterConfig
from kvplug.server.cluster_config import ClusterConfig
from kvplug.server.worker_spec import EXAMPLES, FORM, OVER_NATS
from kvplug.server.worker_spec import WorkerSpec as WorkerSpec
from kvplug.setting import ABOVE_0, AT_LEAST_0, Limits, check_settings, finite, setting, whole
from kvplug.topics import Topic

LogFormat = Literal["text", "json"]

_LISTEN = re.compile(r"^(\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}\Z")
_PLAIN_PATH = re.compile(r"^[A-Za-z0-9/._+-]{1,80}\Z")
_COUNT_OR_NONE = Limits("above 0", lambda value: value is None or whole(value) > 0)


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """Where the tokenizer of a model is; without `model`: of all that have none of their own."""

    folder: Path
    model: str = ""

    @classmethod
    def parse(cls, text: str) -> TokenizerFolder:
        """From the form that `--tokenizer` has."""
        model, equals, folder = text.rpartition("=")
        if not folder:
            raise ConfigError(f"tokenizer {text!r}: expected [MODEL=]FOLDER")
        # A folder may have "=" in its name, a model's name has no leading slash.
        if equals and model and not model.startswith(("/", ".")):
            return cls(Path(folder), model)
        return cls(Path(text))

    @property
    def text(self) -> str:
        """In that form."""
        return f"{self.model}={self.folder}" if self.model else str(self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the standalone router serves; `router`: how it routes; `cluster`: with whom it shares
    what it knows.
    """

    workers: tuple[WorkerSpec, ...] = setting(
        (),
        "an engine; repeat for each. `ADDRESS`: the URL of its API, or `unix:/path` of its socket "
        "(`vllm serve --uds`), or the event endpoint of kvplug's plug-in, which reports the URL. "
        "`events`: where it publishes KV events (`tcp://host:port`, `ipc://path`), by default "
        "what the engine reports; `nats`: over `--nats`, by default if the engine reports none "
        "that is reached. vLLM before 0.32 reports none; without events only an engine's "
        "load counts. `replay`: the `replay_endpoint` of a stock publisher, from which lost "
        "events are fetched. With data-parallel ranks, endpoints are those of rank 0, and the "
        "other ranks have the next ports. `topic`: subscribe only to topics with this prefix; over "
        "NATS, the engine's name there if that is not `ADDRESS`. `block_size`: overrides "
        "`--block-size`. `dp_size`: number of data-parallel ranks, by default what the engine "
        "reports",
        flag=f"--worker {FORM}",
        default_text="required without --admin-api-key-file",
        parse=WorkerSpec.parse,
    )
    host: str = setting("127.0.0.1", "address to listen on", flag="--host, --http-host")
    port: int = setting(
        8000,
        "port to listen on; 0 takes a free one, and the log says which",
        limits=Limits("in [0, 65535]", lambda value: 0 <= whole(value) < 2**16),
        flag="--port, --http-port",
    )
    router: RouterConfig = field(default_factory=RouterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tokenizers: tuple[TokenizerFolder, ...] = setting(
        (),
        "folder with `tokenizer.json`, `tokenizer_config.json` and the chat template, for one "
        "`MODEL`, or without `MODEL` for all others; repeat for each. By default that of the model "
        "that the engine reports: a folder, or a model in this machine's Hugging Face cache",
        flag="--tokenizer [MODEL=]FOLDER",
        default_text="the model's folder",
        parse=TokenizerFolder.parse,
    )
    tokenizer_cache_bytes: int = setting(
        64 * 2**20,
        "memory, per model, for texts and their token ids. What a prompt has in common with "
        "earlier ones is not [tokenized](tokenization.md) again",
        limits=ABOVE_0,
        flag="--tokenizer-cache-bytes",
    )
    tokenizer_block_chars: int = setting(
        256,
        "characters per entry of that cache. Larger blocks take less memory, but more is "
        "tokenized again where two texts diverge",
        limits=ABOVE_0,
        flag="--tokenizer-block-chars",
    )
    tokenizer_min_overlap: float = setting(
        1.0,
        "if at least this share of a text is in that cache (its beginning), the rest is not "
        "tokenized and matches no cached block; 1 turns this off and is exact",
        limits=Limits("above 0 and at most 1", lambda value: 0 < finite(value) <= 1),
        flag="--tokenizer-min-overlap",
    )
    tokenizer_threads: int = setting(
        4,
        "threads that tokenize long prompts; short ones are tokenized on the event loop",
        limits=ABOVE_0,
        flag="--tokenizer-threads",
    )
    worker_api_key_file: Path | None = setting(
        None,
        "file with the API key of the engines (`vllm serve --api-key`), for the router's own"
        " requests: models, metrics, probes. Clients' requests are forwarded with the key that"
        " the client sent, or without one",
        flag="--worker-api-key-file FILE",
    )
    admin_api_key_file: Path | None = setting(
        None,
        "file with the key for `/select`, `/reservations` and `/workers` ([selections]"
        "(http-api.md#selection)), sent as `Authorization: Bearer KEY`. Without a key, only "
        "programs on this machine may use them if the router listens on loopback, and nobody "
        "otherwise",
        flag="--admin-api-key-file FILE",
    )
    events_bind: str | None = setting(
        None,
        "an endpoint that engines connect to, to send their events (`tcp://*:5557`). Topics tell "
        "engines apart: the `--worker` of each has `topic=kv@POD@MODEL` and no `events` "
        "([events](events.md#who-connects-to-whom))",
        flag="--events-bind ENDPOINT",
    )
    events_key_file: Path | None = setting(
        None,
        "the router's secret [CURVE key](security.md#keys), a `.key_secret` file of "
        "`zmq.auth.create_certificates`. All event streams are then encrypted, and the router "
        "follows only publishers with the key in `--events-server-key`. Stock publishers have no "
        "keys, so it cannot follow them",
        flag="--events-key-file FILE",
    )
    events_server_key: Path | None = setting(
        None,
        "the public CURVE key of the engines' publishers, a `.key` file; with `--events-key-file`",
        flag="--events-server-key FILE",
    )
    max_body_bytes: int = setting(
        32 * 2**20,
        "largest request body; a larger one gets 413",
        limits=ABOVE_0,
        flag="--max-body-bytes",
    )
    health_interval_s: float = setting(
        2.0,
        "interval between health checks of a worker",
        limits=ABOVE_0,
        flag="--health-interval-s",
    )
    connect_timeout_s: float = setting(
        5.0,
        "time limit for connecting to a worker, and for its answer to a health check",
        limits=ABOVE_0,
        flag="--connect-timeout-s",
    )
    eject_after: int = setting(
        5,
        "failures in a row (no answer, a broken one, status 500, 502, 503 or 504) after which a "
        "worker gets no requests for `--ejection-s`, unless all workers of the model fail; "
        "0 turns this off",
        limits=Limits("at least 0", lambda value: whole(value) >= 0),
        flag="--eject-after",
    )
    ejection_s: float = setting(
        5.0,
        "how long a failing worker gets no requests. Then one request tries it. Each failed try "
        "doubles the time, up to 16 times this value",
        limits=ABOVE_0,
        flag="--ejection-s",
    )
    migrate_streams: bool = setting(
        False,
        "continue a stream on another worker when its worker goes away ([which streams]"
        "(migration.md#the-standalone-router)). The router asks the engine for the token ids of "
        "each chunk (vLLM since 0.10.2) and removes them from the answer. Off by default: it "
        "changes request bodies, and each chunk costs the router more",
        flag="--migrate-streams",
    )
    ask_usage: bool = setting(
        False,
        "ask engines for the usage of each stream, for the [audit](audit.md), unless the client "
        "sets `stream_options`, and remove its chunk from the answer. Off by default: it changes "
        "request bodies",
        flag="--ask-usage",
    )
    request_timeout_s: float = setting(
        600.0,
        "how long a worker may send nothing within a request; then 504",
        limits=ABOVE_0,
        flag="--request-timeout-s",
    )
    client_timeout_s: float = setting(
        60.0,
        "time limit for a client's request to arrive; then 408. After the same time the router "
        "closes an idle connection, and one whose client reads nothing of its answer",
        limits=ABOVE_0,
        flag="--client-timeout-s",
    )
    max_connections: int | None = setting(
        None,
        "client connections at a time; further ones get 503 and are closed. By default half of "
        "the descriptors (`ulimit -Hn`) that the workers leave, as a stream takes two",
        limits=_COUNT_OR_NONE,
        flag="--max-connections",
        default_text="from `ulimit -Hn`",
    )
    max_in_flight: int | None = setting(
        None,
        "requests that are served at a time; further ones wait in a queue, first in, first out. "
        "Requests through nginx count. Requests for token counts and token ids, and those that a "
        "gateway forwards itself after `/select`, do not",
        limits=_COUNT_OR_NONE,
        flag="--max-in-flight",
        default_text="no limit",
    )
    queue_size: int | None = setting(
        None,
        "requests that may wait in the queue; further ones get 429 with `Retry-After`",
        limits=Limits("at least 0", lambda value: value is None or whole(value) >= 0),
        flag="--queue-size",
        default_text="as --max-in-flight",
    )
    queue_timeout_s: float = setting(
        60.0,
        "how long a request may wait in the queue; then 429",
        limits=ABOVE_0,
        flag="--queue-timeout-s",
    )
    engine_wait_timeout_s: float = setting(
        0.0,
        "how long a request waits while no worker of its model is up, for example while engines "
        "start; then 503",
        limits=AT_LEAST_0,
        flag="--engine-wait-timeout-secs",
    )
    grace_s: float = setting(
        10.0,
        "time that requests in flight have to finish when the router stops",
        limits=ABOVE_0,
        flag="--grace-s",
    )
    processes: int = setting(
        1,
        "processes that serve requests on the same port. With more than 1, another process "
        "follows the events, and all share one index and one load "
        "([several processes](deploying.md#several-processes))",
        limits=Limits("in [1, 64]", lambda value: 1 <= whole(value) <= 64),
        flag="--processes",
    )
    audit_sample: float = setting(
        1.0,
        "share of the requests that are [audited](audit.md): their predicted cached tokens are "
        "compared with the answer; 0 is off",
        limits=Limits("in [0, 1]", lambda value: 0 <= finite(value) <= 1),
        flag="--audit-sample",
    )
    log_format: LogFormat = setting(
        "text", "`text`, or `json`: one object per line", flag="--log-format"
    )
    log_requests: bool = setting(
        False,
        "log a line for each request when it is over ([what is in it](metrics.md#the-log))",
        flag="--log-requests",
    )
    explain_headers: bool = setting(
        False,
        "add headers to each answer that explain the decision: `x-kvplug-worker`, "
        "`x-kvplug-overlap` (tokens of the prompt that the worker was expected to have cached), "
        "`x-kvplug-cost`, `x-kvplug-reason`. Off by default: workers' names are internal "
        "addresses, and the overlap tells a client whether somebody sent that prefix before",
        flag="--explain-headers",
    )
    otel_endpoint: str | None = setting(
        None,
        "where to send spans, by OTLP over HTTP, such as `http://127.0.0.1:4318` ([traces]"
        "(metrics.md#traces)); needs `kvplug[otel]`",
        flag="--otel-endpoint URL",
        default_text="from `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or "
        "`OTEL_EXPORTER_OTLP_ENDPOINT`, else none",
    )
    nginx_config: Path | None = setting(
        None,
        "write the configuration of an nginx that forwards the bytes while the router decides "
        "([how](deploying.md#nginx)), at each start. The file's folder also gets the socket "
        "between the two, and what nginx writes",
        flag="--nginx-config FILE",
    )
    nginx_listen: str = setting(
        "127.0.0.1:8080",
        "where that nginx listens",
        flag="--nginx-listen HOST:PORT",
        limits=Limits("HOST:PORT, like 127.0.0.1:8080 or *:80", lambda v: bool(_LISTEN.match(v))),
    )
    nginx_group: str | None = setting(
        None,
        "group that may use the socket, if nginx's workers run as another user than the router. "
        "The router's user must be a member",
        flag="--nginx-group GROUP",
        limits=Limits("a group of this machine", lambda v: v is None or _is_group(v)),
    )

    def __post_init__(self) -> None:
        if not self.workers and self.admin_api_key_file is None:
            raise ConfigError(
                f"no workers: name at least one with --worker {EXAMPLES}; or set "
                "--admin-api-key-file, and add them while the router runs"
            )
        for name in ("name", "events", "replay"):
            self._require_distinct(name)
        check_settings(self)
        self._require_folders()
        _ = self.worker_api_key, self.admin_api_key, self.event_keys  # check themselves
        if self.queue_size is not None and self.max_in_flight is None:
            raise ConfigError(
                "queue_size: expected max_in_flight with it; without it, no request waits"
            )
        self._require_topics()
        self._require_urls()
        self._require_shareable()
        self._require_nginx()
        self._require_cluster()

    @property
    def queue_limit(self) -> int:
        """How many requests may wait."""
        return (self.max_in_flight or 0) if self.queue_size is None else self.queue_size

    @property
    def tokenizer_folders(self) -> dict[str, Path]:
        """By model; under "" that of all others, if there is one."""
        return {each.model: each.folder for each in self.tokenizers}

    @property
    def worker_api_key(self) -> str | None:
        """Read from its file when it is asked for: a field could be printed."""
        return self._key_in("worker_api_key_file")

    @property
    def admin_api_key(self) -> str | None:
        """Likewise."""
        return self._key_in("admin_api_key_file")

    def _key_in(self, name: str) -> str | None:
        file: Path | None = getattr(self, name)
        if file is None:
            return None
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name}: cannot be read: {error}") from error
        if not (key.isascii() and key.isprintable() and key):
            raise ConfigError(
                f"{name}: expected a line of printable ASCII characters in {str(file)!r}, got none "
                "or others"
            )
        return key

    @property
    def event_keys(self) -> ClientKeys | None:
        """Read from their files, too; None: event streams are not encrypted."""
        if self.events_key_file is None and self.events_server_key is None:
            return None
        if self.events_key_file is None or self.events_server_key is None:
            raise ConfigError(
                "events_key_file, events_server_key: expected both, the router's secret key and "
                "the public key of the engines' publishers; got one"
            )
        if self.events_bind is not None:
            raise ConfigError(
                "events_bind: expected none with events_key_file, as engines that connect to the "
                "router cannot be checked; name each engine's endpoint with events="
            )
        return ClientKeys.from_files(self.events_key_file, self.events_server_key)

    def _require_distinct(self, name: str) -> None:
        """Two engines never share an address; a copied one would mix their blocks."""
        seen: dict[str, WorkerSpec] = {}
        for worker in self.workers:
            address = getattr(worker, name)
            # Publishers that share an endpoint are told apart by their topics.
            if address in (None, OVER_NATS) or (name == "events" and worker.topic):
                continue
            if address in seen and name == "name":
                raise ConfigError(f"worker {address!r} is named twice")
            if address in seen:
                raise ConfigError(
                    f"workers {seen[address].name!r} and {worker.name!r} have the same "
                    f"{name}={address}; expected an endpoint of its own for each"
                )
            seen[address] = worker

    def _require_folders(self) -> None:
        models = [each.model for each in self.tokenizers]
        for each in self.tokenizers:
            if not each.folder.is_dir():
                raise ConfigError(f"tokenizers: expected a folder, {str(each.folder)!r} is none")
            if models.count(each.model) > 1:
                whose = f"model {each.model!r}" if each.model else "all models"
                raise ConfigError(f"tokenizers: {whose} has two; expected one folder for each")

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
                    f"worker {worker.name!r} shares a socket with others: expected a topic like "
                    f"kv@POD or kv@POD@MODEL, got {worker.topic!r}"
                )

    def _require_shareable(self) -> None:
        """What several processes cannot do as one is refused."""
        if self.processes == 1:
            return
        attempt = f"processes: expected 1 with %s, got {self.processes}"
        if self.router.mode != "kv" or not self.router.follows_events:
            raise ConfigError(attempt % "a mode that does not use KV events")
        if self.nginx_config is not None:
            raise ConfigError(attempt % "nginx_config, as nginx asks one process")
        for worker in self.workers:
            if worker.url is None:
                reason = f"worker {worker.name!r}, whose URL only its events say; name its URL"
                raise ConfigError(attempt % reason)

    def _require_urls(self) -> None:
        """Where events are not followed, nobody says a URL."""
        for worker in self.workers:
            if worker.url is None and not self.router.follows_events:
                raise ConfigError(
                    f"worker {worker.name!r}: expected the URL of its API, as this router follows "
                    "no events, which would report it"
                )

    def _require_cluster(self) -> None:
        if self.cluster.router_replica_sync and self.processes > 1:
            raise ConfigError(
                f"processes: expected 1 with router_replica_sync, got {self.processes}; start more "
                "routers instead"
            )
        if self.cluster.nats is not None and self.events_bind is not None:
            raise ConfigError(
                "events_bind: expected none with nats, over which engines send their events, too"
            )
        self.cluster.require_use(follows_events=self.router.follows_events)
        over_nats = [worker.name for worker in self.workers if worker.events == OVER_NATS]
        if self.cluster.nats is None and over_nats:
            raise ConfigError(
                f"worker {over_nats[0]!r} has events=nats: expected nats, a server's URL"
            )

    def _require_nginx(self) -> None:
        """Its paths go into nginx's configuration, where other characters have a meaning."""
        if self.nginx_config is None:
            return
        if not _PLAIN_PATH.match(str(self.nginx_config.absolute())):
            raise ConfigError(
                "nginx_config: expected a path of at most 80 letters, digits and ./+_-, got "
                f"{str(self.nginx_config)!r}"
            )
        for worker in self.workers:
            if worker.url is not None and worker.url.startswith("https:"):
                raise ConfigError(
                    f"worker {worker.name!r}: expected http:// with nginx_config, as nginx is told "
                    "no certificates of workers"
                )


def _is_group(name: str) -> bool:
    try:
        return bool(grp.getgrnam(name))
    except KeyError:
        return False
