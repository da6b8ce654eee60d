"""Keys and certificates for tests: nkeys, credentials with JWTs of an operator, TLS.

In:  a folder.   Out: files as kvplug's flags name them, lines of nats-server's configuration.
"""

import base64
import hashlib
import json
import os
import subprocess
import time

import nkeys


class User:
    """An nkey: `public`, and its seed in a file that only we can read."""

    def __init__(self, folder, name):
        self.seed, self.public, self.pair = new_key(nkeys.PREFIX_BYTE_USER)
        self.file = folder / f"{name}.nk"
        self.file.write_text(self.seed)
        self.file.chmod(0o600)


def new_key(kind):
    seed = nkeys.encode_seed(os.urandom(32), kind)
    pair = nkeys.from_seed(bytearray(seed))
    return seed.decode(), pair.public_key.decode(), pair


class Operator:
    """An operator with an account beside the system's. Their JWTs are in the server; `creds` are
    of its users.
    """

    def __init__(self, folder):
        self._folder = folder
        _, self._public, self._pair = new_key(nkeys.PREFIX_BYTE_OPERATOR)
        _, self._account, self._account_pair = new_key(nkeys.PREFIX_BYTE_ACCOUNT)
        _, self._system, _ = new_key(nkeys.PREFIX_BYTE_ACCOUNT)

    @property
    def lines(self):
        operator = signed(self._pair, self._public, self._public, "O", "operator", {})
        stored = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
        account, system = (
            self._account_of(self._account, stored),
            self._account_of(self._system, {}),
        )
        return (
            f"operator: {operator}\nsystem_account: {self._system}\nresolver: MEMORY\n"
            f"resolver_preload: {{ {self._account}: {account}, {self._system}: {system} }}\n"
        )

    def _account_of(self, public, more):
        names = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
        limits = dict.fromkeys(names, -1) | {"wildcards": True} | more
        return signed(self._pair, self._public, public, "account", "account", {"limits": limits})

    def creds(self, name, allowed):
        """A .creds file of a user who may do this."""
        seed, public, _ = new_key(nkeys.PREFIX_BYTE_USER)
        may = {
            "pub": {"allow": list(allowed.publish)}, "sub": {"allow": list(allowed.subscribe)},
            "subs": -1, "data": -1, "payload": -1,
        }  # fmt: skip
        if allowed.answers:
            may["resp"] = {"max": 1_000_000, "ttl": 300 * 10**9}
        token = signed(self._account_pair, self._account, public, "U", "user", may)
        file = self._folder / f"{name}.creds"
        file.write_text(
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        )
        file.chmod(0o600)
        return file


def signed(pair, issuer, subject, name, kind, more):
    """A JWT, version 2, as nats-server reads it."""
    claims = {
        "iat": int(time.time()), "iss": issuer, "name": name, "sub": subject,
        "nats": more | {"type": kind, "version": 2},
    }  # fmt: skip
    digest = hashlib.new("sha512_256", json.dumps(claims).encode()).digest()
    claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    text = ".".join(encoded(json.dumps(each).encode()) for each in (head, claims))
    return f"{text}.{encoded(pair.sign(text.encode()))}"


def encoded(data):
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def make_certificates(folder):
    """A CA, and certificates of a server on loopback and of a client: ca.pem, server.pem, ..."""
    request(folder, "-x509", "-subj", "/CN=ca", "-keyout", "ca-key.pem", "-out", "ca.pem")
    for name, usage in (("server", "serverAuth"), ("client", "clientAuth")):
        request(
            folder, "-x509", "-subj", f"/CN={name}", "-CA", "ca.pem", "-CAkey", "ca-key.pem",
            "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE",
            "-addext", f"extendedKeyUsage={usage}",
            "-keyout", f"{name}-key.pem", "-out", f"{name}.pem",
        )  # fmt: skip
        (folder / f"{name}-key.pem").chmod(0o600)


def request(folder, *arguments):
    subprocess.run(
        ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "1", *arguments],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip


def tls_lines(folder):
    """Of a server that wants to see a client's certificate, too."""
    return (
        f'tls {{ cert_file: "{folder}/server.pem", key_file: "{folder}/server-key.pem", '
        f'ca_file: "{folder}/ca.pem", verify: true }}\n'
    )
