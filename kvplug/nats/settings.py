"""NatsSettings: where the NATS servers are, and how to authenticate there.

In:  the router's flags, or $KVPLUG_NATS* in an engine.   Out: what a connection needs; ConfigError.

Secrets are in files: `.creds` (a JWT and its seed), the seed of an nkey, the key of a TLS
certificate. A URL with a password is refused, as logs and `ps` would show it.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kvplug.errors import ConfigError

SERVERS: Final = "KVPLUG_NATS"
FLEET: Final = "KVPLUG_NATS_FLEET"
CREDS_FILE: Final = "KVPLUG_NATS_CREDS_FILE"
NKEY_FILE: Final = "KVPLUG_NATS_NKEY_FILE"
TLS_CA_FILE: Final = "KVPLUG_NATS_TLS_CA_FILE"
TLS_CERT_FILE: Final = "KVPLUG_NATS_TLS_CERT_FILE"
TLS_KEY_FILE: Final = "KVPLUG_NATS_TLS_KEY_FILE"
VARIABLES: Final = (
    SERVERS, FLEET, CREDS_FILE, NKEY_FILE, TLS_CA_FILE, TLS_CERT_FILE, TLS_KEY_FILE,
)  # fmt: skip

_SCHEMES: Final = ("nats", "tls")
_FLEET: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsSettings:
    """servers: `nats://host:port` or `tls://host:port`, any of one cluster; fleet: engines and
    routers of another fleet do not see each other.

    creds_file or nkey_file: who this is, to the server; tls_ca_file: who signed the server's
    certificate, by default whom the system trusts; tls_cert_file, tls_key_file: one's own.
    """

    servers: tuple[str, ...]
    fleet: str = "default"
    creds_file: Path | None = None
    nkey_file: Path | None = None
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("no NATS server is named: expected a URL like nats://127.0.0.1:4222")
        for each in self.servers:
            _require_url(each)
        if not _FLEET.fullmatch(self.fleet):
            raise ConfigError(
                f"a fleet's name has 1 to 64 letters, digits, _ or -, got {self.fleet!r}"
            )
        if self.creds_file is not None and self.nkey_file is not None:
            raise ConfigError("NATS needs credentials or an nkey: expected one file, got both")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ConfigError("a TLS certificate and its key belong together: got one of them")
        for file in filter(None, (self.creds_file, self.nkey_file, self.tls_key_file)):
            _require_private(file)

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> NatsSettings | None:
        """As $KVPLUG_NATS* say, several servers with commas between them; None without servers."""
        said = {name: variables[name] for name in VARIABLES if variables.get(name)}
        if SERVERS not in said:
            if said:
                raise ConfigError(f"{', '.join(said)} needs {SERVERS}, a URL of a NATS server")
            return None
        files = {
            name.removeprefix("KVPLUG_NATS_").lower(): Path(value)
            for name, value in said.items()
            if name not in (SERVERS, FLEET)
        }
        servers = tuple(each.strip() for each in said[SERVERS].split(",") if each.strip())
        return cls(servers=servers, fleet=said.get(FLEET, "default"), **files)

    def connect_options(self) -> dict[str, Any]:
        """Keyword arguments of nats.connect, all but callbacks; ConfigError for a file that cannot
        be read.
        """
        options: dict[str, Any] = {"servers": list(self.servers)}
        if self.creds_file is not None:
            options["user_credentials"] = str(self.creds_file)
        if self.nkey_file is not None:
            options["nkeys_seed"] = str(self.nkey_file)
        if self._uses_tls:
            options["tls"] = self._tls_context()
        return options

    @property
    def _uses_tls(self) -> bool:
        files = self.tls_ca_file, self.tls_cert_file
        return any(files) or any(each.startswith("tls:") for each in self.servers)

    def _tls_context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.tls_ca_file)
            if self.tls_cert_file is not None:
                context.load_cert_chain(self.tls_cert_file, self.tls_key_file)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"cannot read the TLS files for NATS: {error}") from error
        return context


def _require_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        has_user = "@" in parts.netloc
        is_url = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
        is_url = is_url and parts.path in ("", "/") and not parts.query
    except ValueError:
        has_user, is_url = "@" in url, False
    if has_user:
        raise ConfigError(
            "a NATS URL may not name a user or a password, which logs would show: expected "
            "nats://HOST:PORT, and credentials or an nkey in a file"
        )
    if not is_url:
        raise ConfigError(f"{url!r} is no NATS URL: expected one like nats://127.0.0.1:4222")


def _require_private(file: Path) -> None:
    """As ssh does with keys: not for everybody on this machine. Groups may read, as Kubernetes
    mounts secrets for one.
    """
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    if mode & 0o007:
        raise ConfigError(f"{file} has a secret and everybody can read it: chmod o-rwx {file}")
