"""Snapshots of a fleet: when one is made, how it comes into force, and what is removed then.

In:  a frozen fleet that has everything up to a stream sequence.   Out: a manifest that names its
snapshot; the stream without what the snapshot has; the snapshot to begin with.

    lease       saves others the same work, and no more
    freeze      the fleet as it is, at stream sequence `seq`
    upload      an object of another name than any other
    manifest    replaced, if it is still the one read before and lower
    purge       the stream up to the manifest's seq, but not what a live replica has yet to read
    collect     objects below the manifest, uploads that never ended

In this order whatever a holder does late is harmless: the manifest only rises, purges stay at or
below a manifest that was, and what lies below it can never be in force again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, Protocol

import nats.js.errors
from nats.aio.client import Client
from nats.js import api

from kvplug.cluster.lease import Lease
from kvplug.cluster.manifest import Held, Manifest, ManifestKey, generation_of
from kvplug.cluster.objects import BrokenObjectError, SnapshotObjects
from kvplug.cluster.state_key import NATS_ERRORS
from kvplug.errors import SnapshotError, TransportError
from kvplug.nats.connection import NatsConnection, translated
from kvplug.nats.subjects import Subjects

logger = logging.getLogger(__name__)

CONSUMER_PREFIX: Final = "router-"
"""Of the durable consumers of replicas, whose acknowledgements hold a purge back."""

_MAX_TRIES: Final = 5
_RETRY_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """When there is a next snapshot, and how long others are waited for; times in seconds.

    threshold: messages in the stream that no snapshot has; min_interval_s: between two snapshots;
    retention_s: of the stream, of which such a message may be half as old; lease_ttl_s: how long a
    holder may be silent; live_s: how long a replica's consumer may, before purges do not wait for
    it; broken_after_s: how old chunks are of an upload that never ended; watch_s: between two looks
    at the manifest; timeout_s: of each answer of the server.
    """

    threshold: int = 10_000
    min_interval_s: float = 30.0
    retention_s: float = 3600.0
    lease_ttl_s: int = 10
    live_s: float = 60.0
    broken_after_s: float = 3600.0
    watch_s: float = 1.0
    timeout_s: float = 10.0


class Frozen(Protocol):
    """A fleet as it was when the stream had been applied up to `seq`, and to nothing beyond."""

    @property
    def seq(self) -> int:
        """Of the last message in it."""

    def encode(self) -> memoryview:
        """The snapshot; in any thread."""


class Restored(NamedTuple):
    """What to begin with: a snapshot, if there is one, and the stream from `seq` + 1 on. reason:
    why there is not the snapshot that the manifest names.
    """

    manifest: Manifest | None
    snapshot: bytearray | None
    seq: int
    reason: str | None = None


Freeze = Callable[[], Awaitable[Frozen]]
STEPS: Final = ("lease", "read", "freeze", "upload", "manifest", "floors", "purge", "collect")
"""What `on_step` is called with, after each."""

OnManifest = Callable[[Manifest, bool], Awaitable[None]]
OnStep = Callable[[str], Awaitable[None]]


async def _no_step(_step: str) -> None:
    """What is called after each step, but for tests."""


class Checkpoints:
    """restore, is_due, make, reset, watch; all in the loop of the connection. One per replica.

    They raise TransportError when NATS cannot be used, and are to be called again later.
    """

    def __init__(
        self,
        connection: NatsConnection,
        subjects: Subjects,
        settings: CheckpointSettings,
        router_id: str,
        *,
        on_step: OnStep = _no_step,
    ) -> None:
        self.manifest: Manifest | None = None
        """Of the generation that this replica follows, as it was last seen."""
        self.num_made = self.num_overtaken = 0
        self._connection, self._subjects, self._settings = connection, subjects, settings
        self._router_id, self._on_step = router_id, on_step
        self.changed_at_s = self._tried_at_s = float("-inf")
        """By time.monotonic(), when this replica saw that the manifest had changed."""

    # -- beginning --

    async def restore(self) -> Restored:
        """The manifest, which this replica follows from now on, and its snapshot; an older one if
        that cannot be read.
        """
        client, reason = await self._connection.connected(), ""
        for _ in range(_MAX_TRIES):
            manifest = self._follow(await self._settled(client))
            if manifest is None or manifest.object is None:
                return Restored(manifest, None, manifest.seq if manifest else 0)
            try:
                found = await self._objects(client).get(manifest.object)
            except (BrokenObjectError, TransportError) as error:
                reason = str(error)
            else:
                return Restored(manifest, found, manifest.seq)
            await asyncio.sleep(_RETRY_S)  # it may have been replaced while it was read
        assert manifest is not None
        snapshot = await self._older(client, manifest)
        instead = "an older one is used" if snapshot else "engines are asked instead"
        logger.warning("the last snapshot cannot be read, %s: %s", instead, reason)
        return Restored(manifest, snapshot, 0, reason)

    async def _older(self, client: Client, manifest: Manifest) -> bytearray | None:
        objects = self._objects(client)
        for name in reversed(await objects.names()):
            if manifest.has_older(name):
                with suppress(BrokenObjectError, TransportError):
                    return await objects.get(name)
        return None

    async def reset(self) -> Manifest:
        """Throw the fleet's states away: a generation without a snapshot, an empty stream."""
        client = await self._connection.connected()
        keys, after = ManifestKey(client, self._subjects.state_bucket), None
        while after is None:
            held, info = await keys.read_any(), await self._stream_info(client)
            created = str(info.created)
            first = held.manifest or await self._first(client, created)
            manifest = first.reset(created, info.state.last_seq)
            after = await keys.replace(held, manifest)
        self._follow(after)
        await self._purge(client, manifest.seq, [])
        await self._collect(client, manifest)
        return manifest

    async def watch(self, on_manifest: OnManifest) -> None:
        """For ever: call it with the manifest of another generation than this replica follows, and
        whether all that is known is to be thrown away; else the stream is to be read from its first
        message on. The generation counts as followed once it returns. It may raise TransportError.
        """
        while True:
            with suppress(TransportError, SnapshotError):
                await self._look(on_manifest)
            await asyncio.sleep(self._settings.watch_s)

    async def _look(self, on_manifest: OnManifest) -> None:
        held = await self._settled(await self._connection.connected())
        manifest = held.manifest
        if manifest is not None and manifest.generation != self._generation:
            await on_manifest(manifest, manifest.reset_generation > self._generation)
        self._follow(held)

    @property
    def _generation(self) -> int:
        return 0 if self.manifest is None else self.manifest.generation

    def _follow(self, held: Held) -> Manifest | None:
        if held.manifest != self.manifest:
            self.manifest, self.changed_at_s = held.manifest, time.monotonic()
        return self.manifest

    async def _settled(self, client: Client) -> Held:
        """The manifest, of the stream that there is: one that was made anew, or has lost its end,
        gives numbers again that a purge up to the manifest's would take unread.
        """
        keys = ManifestKey(client, self._subjects.state_bucket)
        for _ in range(_MAX_TRIES):
            held, info = await keys.read(), await self._stream_info(client)
            manifest, created = held.manifest, str(info.created)
            if manifest is None:
                return held
            if manifest.created == created and info.state.last_seq >= manifest.seq:
                return held
            logger.warning(
                "the stream %s is another one, or has lost its end: it is at %d, the manifest of "
                "snapshots at %d; generation %d begins",
                self._subjects.stream, info.state.last_seq, manifest.seq, manifest.generation + 1,
            )  # fmt: skip
            after = await keys.replace(held, manifest.on_stream(created))
            if after is not None:
                return after
        raise TransportError("cannot settle the manifest of snapshots: others change it all along")

    # -- when --

    async def is_due(self, applied_seq: int | None = None) -> bool:
        """Whether a snapshot is to be made now, and nobody else makes one.

        `applied_seq`: up to where this replica has read the stream, by default all of it: one that
        lags leaves the work to others.
        """
        since_s = time.monotonic() - max(self._tried_at_s, self.changed_at_s)
        if since_s < self._settings.min_interval_s:
            return False
        client = await self._connection.connected()
        held = await self._settled(client)
        if held.manifest is not None and held.manifest.generation == self._generation:
            self._follow(held)
        state = (await self._stream_info(client)).state
        seq, size = (held.manifest.seq, held.manifest.size) if held.manifest else (0, 0)
        last = state.last_seq if applied_seq is None else min(applied_seq, state.last_seq)
        is_due = self._is_long(state, last - seq, size) or (
            last > seq and await self._is_old(client, state, seq)
        )
        return is_due and await self._lease(client).is_free()

    def _is_long(self, state: api.StreamState, num_unsaved: int, size: int) -> bool:
        """Many messages are in no snapshot, and more bytes of them than a snapshot would have."""
        num_unsaved = min(num_unsaved, state.messages)
        num_bytes = state.bytes * num_unsaved / max(1, state.messages)
        return num_unsaved > self._settings.threshold and num_bytes > size

    async def _is_old(self, client: Client, state: api.StreamState, seq: int) -> bool:
        """A message that is in no snapshot would soon be gone."""
        if not state.messages:
            return False
        js = client.jetstream(timeout=self._settings.timeout_s)
        first, everything = max(seq + 1, state.first_seq), ">"
        try:
            message = await js.get_msg(self._subjects.stream, first, subject=everything, next=True)
        except nats.js.errors.NotFoundError:  # it has gone just now
            return False
        except NATS_ERRORS as error:
            raise translated(error, "read the oldest message that is in no snapshot") from error
        age = datetime.now(UTC) - message.time if message.time else timedelta(0)
        return age.total_seconds() > self._settings.retention_s / 2

    # -- making one --

    async def make(self, freeze: Freeze) -> Manifest | None:
        """Have a snapshot come into force; None if another replica makes one, or was faster, or if
        this one follows another generation.
        """
        client = await self._connection.connected()
        async with self._lease(client).held() as is_mine:
            if not is_mine:
                return None
            self._tried_at_s = time.monotonic()
            await self._on_step("lease")
            return await self._make(client, freeze)

    async def _make(self, client: Client, freeze: Freeze) -> Manifest | None:
        manifest = await self._commit(client, freeze)
        if manifest is None:
            self.num_overtaken += 1
            return None
        self.num_made += 1
        floors = await self._floors(client)
        await self._on_step("floors")
        await self._purge(client, manifest.seq, floors)
        await self._on_step("purge")
        await self._collect(client, manifest)
        await self._on_step("collect")
        return manifest

    async def _commit(self, client: Client, freeze: Freeze) -> Manifest | None:
        """The steps up to the manifest; None if another one is in force."""
        held = await self._settled(client)
        if held.manifest is not None and held.manifest.generation != self._generation:
            return None
        await self._on_step("read")
        frozen = await freeze()
        await self._on_step("freeze")
        info = await self._stream_info(client)
        before = held.manifest or await self._first(client, str(info.created))
        # A number that the stream does not have is of before it was made anew, or lost its end.
        is_of_stream = before.created == str(info.created) and frozen.seq <= info.state.last_seq
        if not is_of_stream or frozen.seq <= before.seq:
            return None
        data = await asyncio.to_thread(frozen.encode)
        manifest = before.with_snapshot(frozen.seq, len(data))
        await self._objects(client).put(manifest.name, data)
        await self._on_step("upload")
        after = await ManifestKey(client, self._subjects.state_bucket).replace(held, manifest)
        if after is None:
            await self._objects(client).delete(manifest.name)
            return None
        self._follow(after)
        await self._on_step("manifest")
        return manifest

    async def _first(self, client: Client, created: str) -> Manifest:
        """What the first manifest follows: if there was one that is lost or damaged, of a
        generation above, so that its objects are collected.
        """
        generations = [generation_of(name) for name in await self._objects(client).names()]
        return Manifest(created=created, generation=max(generations, default=-1) + 1)

    async def _floors(self, client: Client) -> list[int]:
        """What each live replica has acknowledged."""
        js = client.jetstream(timeout=self._settings.timeout_s)
        try:
            infos = await js.consumers_info(self._subjects.stream)
        except NATS_ERRORS as error:
            raise translated(error, "list the replicas' consumers") from error
        replicas = [each for each in infos if each.name.startswith(CONSUMER_PREFIX)]
        now, live_s = datetime.now(UTC), self._settings.live_s
        live = [each.ack_floor for each in replicas if _is_live(each, now, live_s)]
        return [floor.stream_seq for floor in live if floor is not None]

    async def _purge(self, client: Client, seq: int, floors: list[int]) -> None:
        js, upto = client.jetstream(timeout=self._settings.timeout_s), min([seq, *floors])
        if upto <= 0:
            return
        try:
            await js.purge_stream(self._subjects.stream, seq=upto + 1)
        except NATS_ERRORS as error:
            raise translated(error, f"purge the stream {self._subjects.stream}") from error

    async def _collect(self, client: Client, manifest: Manifest) -> None:
        """Remove what can never be in force again."""
        objects = self._objects(client)
        for name in await objects.names():
            if name < manifest.floor and name != manifest.object:
                await objects.delete(name)
        if manifest.object is not None:
            await objects.delete_broken(self._settings.broken_after_s, than=manifest.object)

    def _objects(self, client: Client) -> SnapshotObjects:
        return SnapshotObjects(client, self._subjects.snapshot_bucket, self._settings.timeout_s)

    def _lease(self, client: Client) -> Lease:
        bucket, ttl_s = self._subjects.state_bucket, self._settings.lease_ttl_s
        return Lease(client, bucket, self._router_id, ttl_s)

    async def _stream_info(self, client: Client) -> api.StreamInfo:
        js = client.jetstream(timeout=self._settings.timeout_s)
        try:
            return await js.stream_info(self._subjects.stream)
        except NATS_ERRORS as error:
            raise translated(error, f"look at the stream {self._subjects.stream}") from error


def _is_live(consumer: api.ConsumerInfo, now: datetime, live_s: float) -> bool:
    """Whether a replica reads by it: it has a pull open, or has acknowledged something of late."""
    if consumer.ack_floor is None:
        return False
    if consumer.num_waiting:
        return True
    heard = consumer.ack_floor.last_active or consumer.created
    return (now - heard).total_seconds() < live_s
