"""What nginx needs of the router: its configuration, a socket for questions, one for ends.

In:  a ServerConfig, the API.   Out: files and sockets, until it is stopped.
"""

from __future__ import annotations

import grp
import logging
import os
import pwd
import resource
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from aiohttp import web

from kvplug.errors import ConfigError
from kvplug.http_service import listening_on
from kvplug.server.api.endpoints import ENDPOINTS
from kvplug.server.config import ServerConfig
from kvplug.server.nginx.configuration import MARK, NginxConfiguration
from kvplug.server.nginx.decisions import Decisions
from kvplug.server.nginx.ends import Ends

logger = logging.getLogger(__name__)

# A Unix socket refuses beyond it at once. Linux cuts it to net.core.somaxconn, by default 4,096.
_BACKLOG: Final = 2**16
_MAX_FILES: Final = 2**16


class NginxFront:
    """start, stop. `application`: the API, with Decisions for its proxy."""

    def __init__(
        self,
        config: ServerConfig,
        file: Path,
        decisions: Decisions,
        application: web.Application,
    ) -> None:
        self._config, self._file, self._folder = config, file, file.parent
        self._ends = Ends(decisions.note_end)
        self._socket_path = self._folder / "decisions.sock"
        # A client that leaves cancels the decision.
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,
            keepalive_timeout=config.client_timeout_s,
            shutdown_timeout=config.grace_s / 2,
            access_log=None,
        )

    async def start(self, port: int) -> None:
        """Ends come to this port, by UDP. TransportError, ConfigError."""
        if not self._folder.is_dir():
            raise ConfigError(f"nginx_config: expected a folder, {str(self._folder)!r} is none")
        async with AsyncExitStack() as started:
            with listening_on("127.0.0.1 by UDP", port):
                self._ends.start(port)
            started.callback(self._ends.stop)
            started.push_async_callback(self._runner.cleanup)
            await self._runner.setup()
            with listening_on(str(self._socket_path), 0):
                listening = _bound(self._socket_path, self._config.nginx_group)
            started.callback(self._socket_path.unlink, missing_ok=True)
            await web.SockSite(self._runner, listening, backlog=_BACKLOG).start()
            self._write(port)
            self._started = started.pop_all()

    async def stop(self) -> None:
        """Decide no more, then hear of no more ends."""
        await self._started.aclose()

    def _write(self, port: int) -> None:
        """Whole or not at all: nginx may be starting."""
        text = self._configuration(port).text
        _require_ours(self._file)
        new = self._file.with_name(self._file.name + ".new")
        try:
            new.write_text(text, encoding="ascii")
            new.replace(self._file)
        except OSError as error:
            raise ConfigError(f"nginx_config: cannot be written: {error}") from error
        logger.info("nginx: nginx -c %s listens on %s", self._file, self._config.nginx_listen)

    def _configuration(self, port: int) -> NginxConfiguration:
        config = self._config
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return NginxConfiguration(
            listen=config.nginx_listen,
            decisions=self._socket_path,
            ends=f"127.0.0.1:{port}",
            folder=self._folder,
            max_body_bytes=config.max_body_bytes,
            connect_timeout_s=config.connect_timeout_s,
            request_timeout_s=config.request_timeout_s,
            client_timeout_s=config.client_timeout_s,
            endpoints=["/v1/models", *(each.path for each in ENDPOINTS)],
            user=_user_of_workers(config.nginx_group),
            num_files=_MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES),
        )


def _require_ours(file: Path) -> None:
    if file.exists() and not file.read_text(errors="replace").startswith(MARK):
        raise ConfigError(
            f"nginx_config: expected no file, or one that kvplug wrote, at {str(file)!r}; "
            "another one is there"
        )


def _user_of_workers(group: str | None) -> tuple[str, str] | None:
    """With its group, of nginx's workers: one that the socket is open to. None where the router
    runs as root, as nginx's workers better do not, or as a user without a name.
    """
    if group is not None:
        return "nobody", group
    try:
        user = pwd.getpwuid(os.geteuid())
        return None if user.pw_uid == 0 else (user.pw_name, grp.getgrgid(user.pw_gid).gr_name)
    except KeyError:
        return None


def _bound(path: Path, group: str | None) -> socket.socket:
    """For the router's user and the group alone: it listens only after that."""
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
        path.chmod(0o600 if group is None else 0o660)
        if group is not None:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
    except OSError:
        bound.close()
        raise
    return bound
