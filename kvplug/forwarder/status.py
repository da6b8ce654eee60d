"""GET /health and GET /metrics of a forwarder.

In:  a Forwarder, an address.   Out: JSON, and Prometheus' text; served by a thread.

The status of /health is 200 as long as NATS is connected: an engine that is not is its own matter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import msgspec

from kvplug._version import __version__
from kvplug.forwarder.engine import ForwardedEngine
from kvplug.forwarder.forwarder import Forwarder
from kvplug.http_service import listening_on, url_of
from kvplug.ingest.trust import Trust

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_METRICS: Final = (
    ("kvplug_forwarder_connected", "gauge", "connected"),
    ("kvplug_forwarder_messages_total", "counter", "num_messages"),
    ("kvplug_forwarder_skipped_total", "counter", "num_skipped"),
    ("kvplug_forwarder_sent_total", "counter", "num_sent"),
    ("kvplug_forwarder_resent_total", "counter", "num_resent"),
    ("kvplug_forwarder_dropped_total", "counter", "num_dropped"),
    ("kvplug_forwarder_waiting_messages", "gauge", "num_waiting"),
    ("kvplug_forwarder_blocks", "gauge", "num_blocks"),
    ("kvplug_forwarder_answers_total", "counter", "num_answers"),
)


def health_of(forwarder: Forwarder) -> dict[str, Any]:
    """What /health says."""
    connection = forwarder.connection
    return {
        "status": "ok" if connection.is_connected and not connection.refused else "degraded",
        "version": __version__,
        "nats": {
            "connected": connection.is_connected,
            "servers": list(connection.settings.servers),
            "fleet": connection.settings.fleet,
            "reconnects": connection.num_reconnects,
            "refused": list(connection.refused),
        },
        "engines": {str(engine.rank): _engine_health(engine) for engine in forwarder.engines},
    }


def _engine_health(engine: ForwardedEngine) -> dict[str, Any]:
    state = engine.trust
    health: dict[str, Any] = {
        "connected": engine.connected,
        "trust": state.level.value,
        "reason": state.reason,
        "fix": state.fix,
        **_counts_of(engine),
    }
    if engine.output is not None:
        health["refusals"] = dict(engine.output.outbox.refusals)
        health["is_silent"] = engine.output.beats.is_silent
    return health


def _counts_of(engine: ForwardedEngine) -> dict[str, int]:
    counts = {"num_messages": engine.num_messages, "num_skipped": engine.num_skipped}
    if engine.output is not None and engine.wire is not None:
        outbox, answers = engine.output.outbox, engine.output.answers
        counts |= {
            "num_sent": outbox.num_sent,
            "num_resent": outbox.num_resent,
            "num_dropped": outbox.num_dropped,
            "num_waiting": outbox.num_waiting,
            "num_answers": answers.num_answers,
            "num_blocks": engine.wire.num_blocks,
        }
    return counts


def metrics_of(forwarder: Forwarder) -> str:
    """What /metrics says."""
    return "".join(f"{line}\n" for line in _lines(forwarder))


def _lines(forwarder: Forwarder) -> Iterator[str]:
    yield "# TYPE kvplug_forwarder_nats_connected gauge"
    yield f"kvplug_forwarder_nats_connected {int(forwarder.connection.is_connected)}"
    yield "# TYPE kvplug_forwarder_trust gauge"
    for engine in forwarder.engines:
        level = engine.trust.level
        for each in (Trust.EXACT, Trust.STALE, Trust.BLIND):
            labels = f'worker="{_escaped(engine)}",level="{each.value}"'
            yield f"kvplug_forwarder_trust{{{labels}}} {int(each is level)}"
    counts = [(_escaped(each), _counts_of(each) | {"connected": int(each.connected)})
              for each in forwarder.engines]  # fmt: skip
    for name, kind, key in _METRICS:
        yield f"# TYPE {name} {kind}"
        for worker, values in counts:
            yield f'{name}{{worker="{worker}"}} {values.get(key, 0)}'


def _escaped(engine: ForwardedEngine) -> str:
    return str(engine.rank).replace("\\", r"\\").replace('"', r"\"")


class StatusServer:
    """start, stop; url."""

    def __init__(self, forwarder: Forwarder, host: str, port: int) -> None:
        """TransportError if the address cannot be had."""

        class Handler(_Handler):
            pages = {  # noqa: RUF012 - of this server
                "/health": lambda: (_status_of(forwarder), "application/json",
                                    msgspec.json.encode(health_of(forwarder))),
                "/metrics": lambda: (HTTPStatus.OK, _TEXT, metrics_of(forwarder).encode()),
            }  # fmt: skip

        with listening_on(host, port):
            self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kvplug-status", daemon=True
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return url_of(str(host), int(port))

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def stop(self) -> None:
        """End, once it was started."""
        self._server.shutdown()
        self._server.server_close()


def _status_of(forwarder: Forwarder) -> HTTPStatus:
    is_ok = forwarder.connection.is_connected
    return HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0  # of a client that says nothing
    pages: dict[str, Any]

    def do_GET(self) -> None:
        """One of the pages."""
        page = self.pages.get(self.path.partition("?")[0])
        status, kind, body = (
            page() if page else (HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")
        )
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: a probe every few seconds is no news."""
