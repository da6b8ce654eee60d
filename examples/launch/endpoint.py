"""A server on this machine, asked over plain HTTP.

In:  its port, a path.   Out: the status and the JSON of the answer.

For the few questions around a run (are you up, empty your cache); the workload has its own client.
`http.client` and not urllib, which would ask a proxy if the environment names one.
"""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: `body` is None where it was not JSON."""

    status: int
    body: Any


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One port on the loopback interface."""

    port: int

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return f"http://{LOOPBACK}:{self.port}"

    def get(self, path: str, *, timeout_s: float = 5.0) -> Reply:
        """Ask; OSError or HTTPException if nobody answers."""
        return self._ask("GET", path, None, timeout_s)

    def post(
        self,
        path: str,
        body: object = None,
        *,
        timeout_s: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send a JSON body; OSError or HTTPException if nobody answers."""
        return self._ask("POST", path, json.dumps(body), timeout_s, headers)

    def is_healthy(self) -> bool:
        """Whether GET /health is answered with 200 now."""
        try:
            return self.get("/health").status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False  # not listening yet, or busy starting

    def _ask(
        self,
        method: str,
        path: str,
        body: str | None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=timeout_s)
        try:
            content = {"Content-Type": "application/json"}
            connection.request(method, path, body, content | dict(headers or {}))
            response = connection.getresponse()
            return Reply(response.status, _parsed(response.read()))
        finally:
            connection.close()


def _parsed(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
