"""ZMQ CURVE keys: streams that only those read, feed and ask who have a key.

In:  key files in zmq.auth's certificate format (`zmq.auth.create_certificates`).
Out: sockets that encrypt, and that refuse everybody else; how many were refused.

A server has a secret key. Clients need its public key, and, if the server has a folder with the
public keys of its clients, one of these. A key file that others than its owner and group can read
or change is refused, as ssh does; the group may, since Kubernetes mounts secrets for one.

ZMQ asks an authenticator, a thread of its own context, whether a client's key is allowed. While
none runs, sockets with allowed clients refuse everybody. A client that does not have the server's
public key fails before that, inside libzmq, and is not counted.
"""

from __future__ import annotations

import logging
import re
import select
import socket
import stat
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from kvplug.errors import ConfigError

logger = logging.getLogger(__name__)

_ENDPOINT: Final = "inproc://zeromq.zap.01"  # rfc.zeromq.org/spec/27
_DOMAIN: Final = b"kvplug"
_VERSION: Final = b"1.0"
_NUM_KEY_BYTES: Final = 32
_OTHERS: Final = 0o007
_MAX_FILE_BYTES: Final = 2**16
_VALUE: Final = re.compile(rb'^\s*(public|secret)-key\s*=\s*"([^"\n]*)"', re.MULTILINE)
_STOP_TIMEOUT_S: Final = 5.0
_NUM_LOGGED: Final = 10
# A file that changed so recently may change again without a new time: clocks of filesystems tick.
_TICK_NS: Final = 2 * 10**9

_Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """protect a socket before it is bound; an authenticator for its context.

    clients: a folder with the public keys that are allowed; None: whoever has the server's public
    key.
    """

    public: bytes
    _secret: bytes = field(repr=False)
    clients: Path | None = None

    @classmethod
    def from_files(cls, secret_key_file: Path, clients: Path | None = None) -> ServerKeys:
        """Read the secret key, and look at the folder of the allowed clients' `.key` files.

        ConfigError if the secret cannot be read, or is no key, or is shown to others, and if there
        is no such folder. A file in the folder that is no key allows nobody.
        """
        public, secret = _secret_key(Path(secret_key_file))
        if clients is not None:
            clients = Path(clients)
            _require_folder(clients)
        return cls(public, secret, clients)

    def protect(self, server: zmq.Socket[bytes]) -> None:
        """Before it is bound: only encrypted connections, of allowed clients if there is a
        folder.
        """
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        server.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        if self.clients is not None:
            server.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        # Without it, libzmq lets everybody in while no authenticator runs.
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def as_client(self) -> ClientKeys:
        """The server's owner as a client of its own streams; ConfigError if the folder of clients
        does not allow its key.
        """
        if self.clients is not None:
            allowed = _AllowedKeys(self.clients)
            allowed.refresh()
            if z85.decode(self.public) not in allowed.keys:
                raise ConfigError(
                    "cannot connect to one's own streams: expected the public key "
                    f"{self.public.decode()} in a .key file of {self.clients}"
                )
        return ClientKeys(self.public, self.public, self._secret)

    def authenticator(self, context: _Context) -> Authenticator:
        """For all sockets of the context; needed if there is a folder of clients."""
        return Authenticator(context, self.clients)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """apply to a socket before it connects."""

    public: bytes
    server_public: bytes
    _secret: bytes = field(repr=False)

    @classmethod
    def from_files(cls, secret_key_file: Path, server_public_key_file: Path) -> ClientKeys:
        """The client's own secret key, and the public one of the servers that it connects to.

        ConfigError if one of them cannot be read, or is no key, or shows a secret to others.
        """
        public, secret = _secret_key(Path(secret_key_file))
        return cls(public, _public_key(Path(server_public_key_file)), secret)

    def apply(self, client: zmq.Socket[bytes]) -> None:
        """Before it connects: only to servers with this public key."""
        client.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
        client.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        client.setsockopt(zmq.CURVE_SECRETKEY, self._secret)


class Authenticator:
    """start before sockets are bound, stop after they are closed; is_alive, num_denied.

    A key file that is added, changed or removed counts from the next client on; a client that is
    connected stays so. zmq.auth's own thread neither counts whom it refuses nor reads keys again.
    """

    def __init__(self, context: _Context, clients: Path | None) -> None:
        """`clients`: None allows every key."""
        self.num_denied = 0
        self._context = context
        self._clients = None if clients is None else _AllowedKeys(clients)
        self._thread = threading.Thread(target=self._run, name="kvplug-curve", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether it answers; while it does not, clients are refused."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Answer from now on; once. ConfigError if the context has an authenticator already."""
        if self._clients is not None:
            self._clients.refresh()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(_ENDPOINT)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                "cannot check the keys of ZMQ clients: expected a context without another "
                f"authenticator, got: {error}"
            ) from error
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; again, or before `start`, is harmless."""
        if not self.is_alive:
            return
        with suppress(OSError):
            self._wake_write.send(b"\0")
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._answer_until_woken()
        except zmq.ZMQError:  # the context ends
            logger.debug("the authenticator's context has ended")
        except Exception:
            logger.exception("checking keys of ZMQ clients failed; all are refused from now on")
        finally:
            self._socket.close(linger=0)
            self._wake_read.close()
            self._wake_write.close()

    def _answer_until_woken(self) -> None:
        poll, wake = select.poll(), self._wake_read.fileno()  # select ends at descriptor 1023
        poll.register(self._socket.fileno(), select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            with suppress(zmq.Again):
                while True:
                    self._answer(self._socket.recv_multipart(zmq.NOBLOCK))
            if wake in dict(poll.poll()):
                return

    def _answer(self, frames: list[bytes]) -> None:
        match frames:
            case [peer, b"", version, request, _, address, _, mechanism, *key]:
                is_allowed = version == _VERSION and mechanism == b"CURVE" and self._allows(key)
                if not is_allowed:
                    self._note_denied(address)
                status = [b"200", b"OK"] if is_allowed else [b"400", b"refused"]
                self._socket.send_multipart([peer, b"", _VERSION, request, *status, b"", b""])

    def _allows(self, credentials: list[bytes]) -> bool:
        if len(credentials) != 1 or len(credentials[0]) != _NUM_KEY_BYTES:
            return False
        if self._clients is None:
            return True
        try:
            self._clients.refresh()
        except ConfigError as error:  # without its folder, nobody is allowed
            logger.warning("%s", error)
        return credentials[0] in self._clients.keys

    def _note_denied(self, address: bytes) -> None:
        self.num_denied += 1
        if self.num_denied <= _NUM_LOGGED:
            at = address[:40].decode(errors="backslashreplace")
            logger.warning(
                "a client at %s is refused: expected a public key in %s",
                at,
                None if self._clients is None else self._clients.folder,
            )


_Stamp = tuple[int, ...]


class _AllowedKeys:
    """The public keys in the `.key` files of a folder. refresh; read `keys`.

    A file that cannot be used allows nobody, is named once, and leaves the others as they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys: frozenset[bytes] = frozenset()
        self._known: dict[Path, tuple[_Stamp, bytes]] = {}  # files that are read, and unchanged
        self._named: set[Path] = set()
        self._is_empty_named = False

    def refresh(self) -> None:
        """Read what is new or has changed. ConfigError, and no keys, if there is no folder."""
        former, self.keys, self._known = self._known, frozenset(), {}
        paths = _key_files(self.folder)
        self._named &= set(paths)
        self.keys = frozenset(
            key for path in paths if (key := self._key_in(path, former.get(path))) is not None
        )
        if not paths and not self._is_empty_named:
            logger.warning("no client is allowed: %s has no .key files", self.folder)
        self._is_empty_named = not paths

    def _key_in(self, path: Path, former: tuple[_Stamp, bytes] | None) -> bytes | None:
        try:
            stamp = _stamp_of(path)
            if former is not None and former[0] == stamp:
                key = former[1]
            else:
                key = z85.decode(_public_key(path))
        except ConfigError as error:
            if path not in self._named:
                logger.warning("%s; it allows nobody", error)
            self._named.add(path)
            return None
        self._named.discard(path)
        if max(stamp[:2]) < time.time_ns() - _TICK_NS:
            self._known[path] = stamp, key
        return key


def _stamp_of(path: Path) -> _Stamp:
    """What differs when a file has changed: its times first. ConfigError for what is no file."""
    expected = "a certificate of zmq.auth.create_certificates"
    try:
        seen = path.stat()
    except OSError as error:
        raise _no_key(path, expected, error.strerror or type(error).__name__) from error
    if not stat.S_ISREG(seen.st_mode):  # a pipe would never end
        raise _no_key(path, expected, "no regular file")
    return seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size, seen.st_ino


def _key_files(folder: Path) -> list[Path]:
    _require_folder(folder)
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(".key"))
    except OSError as error:
        raise _no_folder(folder, error.strerror or type(error).__name__) from error


def _require_folder(folder: Path) -> None:
    try:
        if folder.is_dir():
            return
        seen = "a file" if folder.exists() else "nothing there"
    except OSError as error:
        seen = error.strerror or type(error).__name__
    raise _no_folder(folder, seen)


def _no_folder(folder: Path, seen: str) -> ConfigError:
    return ConfigError(
        f"cannot read the keys of allowed clients: expected a folder of .key files at {folder}, "
        f"got: {seen}"
    )


def _secret_key(path: Path) -> tuple[bytes, bytes]:
    """The public and the secret key of a certificate that others cannot read."""
    public, secret = _certificate(path)
    if secret is None:
        raise _no_key(path, "a secret key", "a public one only (its .key_secret file has both)")
    mode = path.stat().st_mode & 0o777
    if mode & _OTHERS:
        raise _no_key(path, "a file that others cannot use (chmod o-rwx)", f"mode {mode:04o}")
    return public, secret


def _public_key(path: Path) -> bytes:
    return _certificate(path)[0]


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    expected = "a certificate of zmq.auth.create_certificates"
    if not zmq.has("curve"):
        raise _no_key(path, "a libzmq with CURVE", f"libzmq {zmq.zmq_version()} without it")
    try:
        with path.open("rb") as file:
            values = dict(_VALUE.findall(file.read(_MAX_FILE_BYTES)))
    except OSError as error:
        raise _no_key(path, expected, error.strerror or type(error).__name__) from error
    for name in (b"public", b"secret") if b"secret" in values else (b"public",):
        if not _is_key(values.get(name, b"")):  # without its value: it may be a secret
            raise _no_key(path, expected, f"no {name.decode()} key of 40 characters in it")
    return values[b"public"], values.get(b"secret")


def _is_key(key: bytes) -> bool:
    try:
        return len(z85.decode(key)) == _NUM_KEY_BYTES
    except Exception:  # noqa: BLE001 - a KeyError, struct.error or ValueError, by its mistake
        return False


def _no_key(path: Path, expected: str, seen: str) -> ConfigError:
    return ConfigError(f"cannot use the key file {path}: expected {expected}, got: {seen}")
