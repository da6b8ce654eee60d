"""The manifest of a fleet's snapshots: one value that every replica reads, and that only rises.

In:  the manifest that holds, what is to follow it.   Out: the next one; None if another replica was
faster.

A snapshot is in force once the manifest names it. (generation, seq) of the manifest never falls, so
an object whose name is below those, and which the manifest does not name, can never be in force
again.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec
from nats.aio.client import Client

from kvplug.cluster.state_key import StateKey
from kvplug.errors import SnapshotError

KEY: Final = "manifest"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """created: of the stream, as the server says; seq: the stream sequence up to which the snapshot
    has everything; object, size: of the snapshot, None and 0 if there is none; reset_generation:
    the one in which the fleet's states were last thrown away.

    Another generation begins with a reset, and when numbers of the stream do not go on as before:
    it was made anew, or lost its end.
    """

    created: str
    generation: int = 0
    seq: int = 0
    object: str | None = None
    size: int = 0
    reset_generation: int = 0

    @property
    def floor(self) -> str:
        """Names of objects below are of snapshots that were."""
        return f"{self.generation:08d}-{self.seq:020d}"

    @property
    def name(self) -> str:
        """Of the object, of a manifest that has one."""
        assert self.object is not None
        return self.object

    def is_above(self, other: Manifest) -> bool:
        """Whether it may replace the other one."""
        return (self.generation, self.seq) > (other.generation, other.seq)

    def with_snapshot(self, seq: int, size: int) -> Manifest:
        """Of a snapshot of this generation, with a name that no other one has."""
        name = f"{self.generation:08d}-{seq:020d}-{secrets.token_hex(8)}"
        return msgspec.structs.replace(self, seq=seq, object=name, size=size)

    def on_stream(self, created: str) -> Manifest:
        """Of the next generation: the snapshot holds, and the stream is read from its first message
        on.
        """
        return msgspec.structs.replace(self, created=created, generation=self.generation + 1, seq=0)

    def reset(self, created: str, seq: int) -> Manifest:
        """Of the next generation, without a snapshot."""
        generation = self.generation + 1
        return Manifest(
            created=created, generation=generation, seq=seq, reset_generation=generation
        )

    def has_older(self, name: str) -> bool:
        """Whether an object of this name is a snapshot of the fleet from before, and since the last
        reset.
        """
        return f"{self.reset_generation:08d}-" <= name < (self.object or "")


def generation_of(name: str) -> int:
    """Of an object by its name; -1 for a name that no manifest gives."""
    generation = name.partition("-")[0]
    return int(generation) if generation.isascii() and generation.isdecimal() else -1


class Held(NamedTuple):
    """The manifest that holds, None if there is none yet, and its revision."""

    manifest: Manifest | None
    revision: int


class ManifestKey:
    """read, read_any, replace."""

    def __init__(self, client: Client, bucket: str, timeout_s: float = 5.0) -> None:
        self._key = StateKey(client, bucket, KEY, timeout_s)

    async def read(self) -> Held:
        """As it is now; SnapshotError for what is no manifest."""
        value, revision = await self._key.read()
        if value is None:
            return Held(None, revision)
        try:
            return Held(msgspec.json.decode(value, type=Manifest), revision)
        except msgspec.MsgspecError as error:
            raise SnapshotError(f"expected a manifest of snapshots, got {error}") from error

    async def read_any(self) -> Held:
        """The same, but what is no manifest counts as none: for who replaces it whatever it is."""
        value, revision = await self._key.read()
        with suppress(msgspec.MsgspecError):
            return Held(msgspec.json.decode(value or b"", type=Manifest), revision)
        return Held(None, revision)

    async def replace(self, held: Held, manifest: Manifest) -> Held | None:
        """What holds now, if `held` did until now; else None."""
        assert held.manifest is None or manifest.is_above(held.manifest)
        revision = await self._key.replace(msgspec.json.encode(manifest), held.revision)
        return None if revision is None else Held(manifest, revision)
