"""NatsFlags: what the command lines of the router and of the forwarder say of NATS alike.

In:  values of flags.   Out: NatsSettings, or a ConfigError in one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvplug.nats.settings import NatsSettings
from kvplug.setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsFlags:
    """The servers, the fleet, and by what right they are used."""

    nats: str | None = setting(
        None,
        "NATS servers of one cluster, `nats://host:port` or `tls://host:port` with commas between "
        "them",
        flag="--nats URL[,URL...]",
    )
    nats_fleet: str = setting(
        "default",
        "name of the fleet; engines and routers of other fleets on the same servers are not seen",
        flag="--nats-fleet",
    )
    nats_creds_file: Path | None = setting(
        None,
        "file with the credentials, a JWT and its seed (`.creds`)",
        flag="--nats-creds-file FILE",
    )
    nats_nkey_file: Path | None = setting(
        None, "file with the seed of the nkey", flag="--nats-nkey-file FILE"
    )
    nats_tls_ca_file: Path | None = setting(
        None,
        "CA certificates that the servers' certificates are checked against",
        flag="--nats-tls-ca-file FILE",
        default_text="those that the system trusts",
    )
    nats_tls_cert_file: Path | None = setting(
        None,
        "client certificate; with `--nats-tls-key-file`",
        flag="--nats-tls-cert-file FILE",
    )
    nats_tls_key_file: Path | None = setting(
        None, "its key; with `--nats-tls-cert-file`", flag="--nats-tls-key-file FILE"
    )

    def settings_at(self, servers: tuple[str, ...]) -> NatsSettings:
        """Of servers at these URLs; ConfigError."""
        return NatsSettings(
            servers=servers,
            fleet=self.nats_fleet,
            creds_file=self.nats_creds_file,
            nkey_file=self.nats_nkey_file,
            tls_ca_file=self.nats_tls_ca_file,
            tls_cert_file=self.nats_tls_cert_file,
            tls_key_file=self.nats_tls_key_file,
        )


def servers_of(text: str) -> tuple[str, ...]:
    """URLs with commas between them."""
    return tuple(each.strip() for each in text.split(",") if each.strip())
