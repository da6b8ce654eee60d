"""Who may select, reserve and change the fleet.

In:  a request.   Out: nothing, or an ApiError that says what is missing.

With a key (`--admin-api-key-file`), whoever has it. Without one, programs of this machine, on a
router that listens on loopback; not a web page in a browser of this machine, which could otherwise
send requests here: it may send no JSON across origins, and names another host or an origin.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from aiohttp import web

from kvplug.api_errors import ApiError
from kvplug.server.config import ServerConfig
from kvplug.server.workers.hosts import is_loopback


class Guard:
    """require that a request may do what it asks for."""

    def __init__(self, config: ServerConfig) -> None:
        self._key = config.admin_api_key
        self._is_local = is_loopback(config.host)

    def require(self, request: web.Request) -> None:
        """ApiError: 401 without the key, 403 where a key would be needed, 415 for no JSON."""
        if self._key is not None:
            self._require_key(request, self._key)
        elif not self._is_local:
            message = f"{request.path} needs a key where the router does not listen on loopback: "
            message += "start it with --admin-api-key-file"
            raise ApiError(403, message, code="admin_key_required")
        else:
            _require_local(request)
        if request.can_read_body and request.content_type != "application/json":
            message = f"expected Content-Type: application/json, got {request.content_type}"
            raise ApiError(415, message, code="invalid_content_type")

    def _require_key(self, request: web.Request, key: str) -> None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # As bytes, which may be anything: of texts only ASCII can be compared.
        if scheme.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode("utf-8", "surrogateescape"), key.encode()
        ):
            return
        message = f"{request.path} needs the admin key: Authorization: Bearer KEY"
        raise ApiError(401, message, code="admin_key_required")


def _require_local(request: web.Request) -> None:
    try:
        host = urlsplit(f"//{request.host}").hostname or ""
    except ValueError:
        host = ""
    if "Origin" in request.headers or not is_loopback(host):
        message = f"{request.path} is for programs of this machine, got Host {request.host!r} or an"
        message += " Origin; for others start the router with --admin-api-key-file"
        raise ApiError(403, message, code="admin_key_required")
