"""Replica: one router of several that share what they know over NATS.

In:  a router, its followers, NATS servers.   Out: an index that begins with the last snapshot and
follows the stream; snapshots for others; how it is.

    connect -> streams -> manifest, snapshot -> [workers are added] -> restore -> [followers resume]
    -> consume from the snapshot's number on -> snapshots when due

The steps in brackets are its owner's. Nothing waits for a server for ever: a router whose servers
are away serves without, and does these steps when they are there. Its blocks are then unknown
until the engines have been asked, or the snapshot is there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

import msgspec

from kvplug.cluster.checkpoints import Checkpoints, CheckpointSettings, Restored
from kvplug.cluster.fleet_snapshot import FrozenFleet, freeze, ranks_in, restore_fleet
from kvplug.cluster.manifest import Manifest
from kvplug.cluster.parts import Part
from kvplug.cluster.presence import Presence, ReplicaSaid
from kvplug.cluster.replica_status import Lag, ReplicaStatus
from kvplug.cluster.streams import Streams, StreamSettings, StreamState
from kvplug.errors import ConfigError, KvplugError, SnapshotError, TransportError, UnknownRankError
from kvplug.events import Rank
from kvplug.ingest.event_thread import EventThread
from kvplug.ingest.follower import Follower
from kvplug.ingest.position import FollowerPosition
from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import Subjects
from kvplug.router.core import Router
from kvplug.transports import TransportFactory
from kvplug.transports.nats import NatsTransport

logger = logging.getLogger(__name__)

ENDPOINT: Final = "nats://"
MIN_SNAPSHOT_INTERVAL_S = 30.0
"""Between two snapshots, however many messages come."""
_CONNECT_TIMEOUT_S: Final = 3.0
_RESTORE_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1
_RETRY_S: Final = 1.0
_LOOK_S: Final = 1.0
_STOP_TIMEOUT_S: Final = 2.0
_CALL_TIMEOUT_S: Final = 60.0
_MARK_TIMEOUT_S: Final = 10.0
_MARK_PAUSE_S: Final = 0.05

_T = TypeVar("_T")


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """router_id: the same at each start; resets_states: begin with nothing, and let all others;
    follows_events: False for a router that only shares its load.
    """

    nats: NatsSettings
    router_id: str
    stream: StreamSettings = StreamSettings()
    snapshot_threshold: int = 10_000
    resets_states: bool = False
    follows_events: bool = True


class Replica:
    """start, prepared, dp_sizes, restore, resume, follow, stop; status."""

    def __init__(self, router: Router, settings: ReplicaSettings) -> None:
        self._router, self._settings = router, settings
        self.subjects = Subjects(settings.nats.fleet)
        self.connection = NatsConnection(settings.nats, f"router-{settings.router_id}")
        self._presence = Presence(
            self.connection, self.subjects, settings.router_id, self._with_state
        )
        self._streams = Streams(self.connection, self.subjects, settings.stream)
        self._checkpoints: Checkpoints | None = None
        self.transport = NatsTransport(self.connection, self.subjects, router_id=settings.router_id)
        self._thread: EventThread | None = None
        self._followers: Callable[[], list[Follower]] = list
        self._num_direct: Callable[[], int] = lambda: 0
        self._num_direct_saved = 0
        self._saved_at_s = self._began_s = time.monotonic()
        self._restored: Restored | None = None
        self._restored_bytes = 0
        self._has_started = self._has_begun = self._has_connected = self._is_stopping = False
        self._positions: dict[Rank, FollowerPosition] = {}
        self._stream: StreamState | None = None
        self._lag = Lag()
        self._problems = {Part.CONNECTION: self._no_connection}
        self._num_snapshots = 0
        self._failed_behind_seq: int | None = None  # a snapshot failed, behind this manifest
        self._goal_seq: int | None = None
        self._ready_after_s: float | None = None

    @property
    def transports(self) -> Mapping[str, TransportFactory]:
        """For the event thread."""
        return {"nats": lambda: self.transport}

    @property
    def router_id(self) -> str:
        """Another than was given, if a router with that one is there."""
        return self._presence.router_id

    # -- the start, step by step --

    def start(self, thread: EventThread | None) -> None:
        """Begin to connect. `thread`: of the events, which has started; None without events."""
        self._thread = thread
        if thread is not None:
            thread.bind(ENDPOINT)
        self.connection.on_change(self._note_connection)
        self.connection.start()
        self._has_started = True
        self._preparing: Future[None] = self.connection.submit(self._prepare())

    async def prepared(self) -> bool:
        """Wait until the snapshot is here, for 3 s while no server is, or none that can be used;
        whether it, or the knowledge that there is none, is.
        """
        preparing, began_s = asyncio.wrap_future(self._preparing), time.monotonic()
        while not preparing.done():
            await asyncio.wait({preparing}, timeout=_POLL_S)
            waited_s = time.monotonic() - began_s
            is_failing = not self.connection.is_connected or Part.STREAM in self._problems
            if waited_s > (_CONNECT_TIMEOUT_S if is_failing else _RESTORE_TIMEOUT_S):
                break
        return preparing.done()

    @property
    def dp_sizes(self) -> dict[str, int]:
        """By worker, how many ranks the snapshot has; workers need them before `restore`."""
        snapshot = None if self._restored is None else self._restored.snapshot
        if snapshot is None:
            return {}
        with suppress(SnapshotError):  # `restore` says it
            sizes: dict[str, int] = {}
            for rank in ranks_in(snapshot):
                sizes[rank.worker] = max(sizes.get(rank.worker, 0), rank.dp_rank + 1)
            return sizes
        return {}

    def restore(self) -> None:
        """Fill the router's index with the snapshot, if it came in time."""
        restored = self._restored
        if restored is None:
            return
        self._has_begun = True
        if restored.snapshot is None:
            return
        try:
            self._positions = restore_fleet(self._router, restored.snapshot)
        except (SnapshotError, ConfigError) as error:  # it has blocks, if the servers came late
            self._note(Part.RESTORE, f"{error}; engines are asked instead")
            self._restored = Restored(restored.manifest, None, 0, str(error))
            self._restored_bytes = 0
        else:
            num_ranks, num_bytes = len(self._positions), len(restored.snapshot)
            self._restored = restored._replace(snapshot=None)  # as large as the index
            logger.info("a snapshot of %d bytes says what %d ranks hold", num_bytes, num_ranks)

    def resume(self, follower: Follower) -> None:
        """Let a new follower begin where the snapshot ends."""
        if (position := self._positions.pop(follower.rank, None)) is not None:
            follower.resume(position)

    def follow(
        self,
        followers: Callable[[], list[Follower]],
        num_direct: Callable[[], int] = lambda: 0,
    ) -> None:
        """Consume the stream, as soon as it is known from where on. `followers`: all there are;
        num_direct: how many messages have come to them from engines, and not over the stream.
        """
        self._followers, self._num_direct = followers, num_direct
        self.connection.submit(self._follow()).add_done_callback(_say_failure)

    async def stop(self) -> None:
        """Leave; the index stays as it is."""
        self._is_stopping = True
        if not self._has_started:
            self.connection.stop()
            return
        with suppress(TransportError, TimeoutError):
            leaving = asyncio.wrap_future(self.connection.submit(self._presence.end()))
            await asyncio.wait_for(leaving, _STOP_TIMEOUT_S)
        await asyncio.to_thread(self.connection.stop)

    # -- in the connection's loop --

    async def _prepare(self) -> None:
        await self.connection.connected()
        await self._presence.begin()
        self.transport.router_id = self.router_id
        if self._settings.follows_events:
            restored = await self._until_done(Part.STREAM, self._read_snapshot)
            self._restored, self._restored_bytes = restored, len(restored.snapshot or b"")

    def _checkpoint_settings(self) -> CheckpointSettings:
        settings = CheckpointSettings(
            threshold=self._settings.snapshot_threshold, min_interval_s=MIN_SNAPSHOT_INTERVAL_S
        )
        max_age_s = 0.0 if self._stream is None else self._stream.max_age_s
        if not max_age_s:  # for ever
            return settings
        return dataclasses.replace(settings, retention_s=max_age_s)

    async def _read_snapshot(self) -> Restored:
        self._note_stream(await self._streams.ensure())
        settings = self._checkpoint_settings()
        self._checkpoints = Checkpoints(self.connection, self.subjects, settings, self.router_id)
        if self._settings.resets_states:
            manifest = await self._checkpoints.reset()
            return Restored(manifest, None, manifest.seq, None)
        try:
            restored = await self._checkpoints.restore()
        except SnapshotError as error:  # of the manifest
            restored = Restored(None, None, 0, f"{error}; --router-reset-states replaces it")
        self._note(Part.RESTORE, restored.reason)
        return restored

    async def _until_done(self, part: Part, attempt: Callable[[], Awaitable[_T]]) -> _T:
        while True:
            try:
                result = await attempt()
            except TransportError as error:
                self._note(part, str(error))
                await asyncio.sleep(_RETRY_S)
            else:
                self._note(part, None)
                return result

    async def _follow(self) -> None:
        await asyncio.wrap_future(self._preparing)
        if not self._settings.follows_events:
            await self._presence.run()
            return
        if not self._has_begun:
            await asyncio.to_thread(self._restore_late)
        await asyncio.to_thread(self._call, self._forget_unclaimed)
        assert self._restored is not None
        self._goal_seq = 0 if self._stream is None else self._stream.last_seq
        self.transport.start_after(self._restored.seq)
        await asyncio.gather(
            self._presence.run(), self._look(), self._make_snapshots(), self._watch()
        )

    def _restore_late(self) -> None:
        """Servers came after the followers: those that have heard nothing yet begin there."""
        self.restore()
        for follower in self._followers():
            self._call(partial(self._resume_late, follower))

    def _resume_late(self, follower: Follower) -> None:
        """In the event thread. One that has heard something knows nothing of these blocks."""
        if follower.num_messages == 0:
            self.resume(follower)
        elif self._positions.pop(follower.rank, None) is not None:
            follower.start_anew()

    def _forget_unclaimed(self) -> None:
        """In the event thread: blocks of ranks that nobody follows would be taken for new ones."""
        for rank in list(self._positions):
            if self._positions.pop(rank, None) is not None:
                with suppress(UnknownRankError):
                    self._router.clear(rank)

    def _call(self, call: Callable[[], _T]) -> _T:
        """In the event thread, which may be busy; not from a loop."""
        assert self._thread is not None
        return self._thread.call(call, timeout_s=_CALL_TIMEOUT_S)

    async def _look(self) -> None:
        """At the stream, every second: whether it is there, and how far behind this one is."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.connection.is_connected:
                with suppress(TransportError):
                    await self._look_once()

    async def _look_once(self) -> None:
        try:
            state = await self._streams.state() or await self._streams.ensure()
        except TransportError as error:
            self._note(Part.STREAM, str(error))
            raise
        self._note_stream(state)
        self._note(Part.STREAM, None)
        if Part.SNAPSHOT in self._problems:  # a bucket may be gone
            with suppress(TransportError):
                await self._streams.ensure()
        if self._ready_after_s is None and self._done_seq >= (self._goal_seq or 0):
            self._ready_after_s = time.monotonic() - self._began_s
            logger.info("ready %.1f s after the start", self._ready_after_s)

    async def _make_snapshots(self) -> None:
        assert self._checkpoints is not None
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if self.connection.is_connected:
                    await self._make_if_due(self._checkpoints)
            except Exception as error:  # noqa: BLE001 - the next one may succeed
                self._note(Part.SNAPSHOT, _sentence(error))

    async def _make_if_due(self, checkpoints: Checkpoints) -> None:
        seq = 0 if checkpoints.manifest is None else checkpoints.manifest.seq
        if await self._is_due(checkpoints):
            self._failed_behind_seq = seq
            made = await checkpoints.make(self._freeze)
            self._num_snapshots += made is not None
            self._num_direct_saved, self._saved_at_s = self._num_direct(), time.monotonic()
            self._failed_behind_seq = None
        if self._failed_behind_seq is None or seq > self._failed_behind_seq:  # another made one
            self._failed_behind_seq = None
            self._note(Part.SNAPSHOT, None)

    async def _is_due(self, checkpoints: Checkpoints) -> bool:
        """By the stream, or by what came from engines directly. A manifest only rises, so that the
        stream needs a number for what did not come over it.
        """
        if await checkpoints.is_due(self.transport.applied_seq):
            return True
        saved_at_s = max(self._saved_at_s, checkpoints.changed_at_s)
        num_unsaved = self._num_direct() - self._num_direct_saved
        if num_unsaved <= self._settings.snapshot_threshold:
            return False
        if time.monotonic() - saved_at_s < MIN_SNAPSHOT_INTERVAL_S:
            return False
        seq = await self._streams.mark()
        deadline_s = time.monotonic() + _MARK_TIMEOUT_S
        while self.transport.applied_seq < seq and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_MARK_PAUSE_S)
        return self.transport.applied_seq >= seq

    async def _freeze(self) -> FrozenFleet:
        return await asyncio.to_thread(self._call, self._freeze_now)

    def _freeze_now(self) -> FrozenFleet:
        """In the event thread: index, positions and number of one moment."""
        return freeze(self._router, self._followers(), self.transport.applied_seq)

    async def _watch(self) -> None:
        assert self._checkpoints is not None
        await self._checkpoints.watch(self._note_manifest)

    async def _note_manifest(self, manifest: Manifest, needs_clear: bool) -> None:
        """Another replica began a generation."""
        if not needs_clear:
            self.transport.start_after(0)
            return
        logger.info("the states were reset (generation %d): engines are asked", manifest.generation)
        for follower in self._followers():
            try:
                await asyncio.to_thread(self._call, follower.sequencer.start_over)
            except TimeoutError as error:
                raise TransportError("the event thread is busy") from error

    # -- how it is --

    @property
    def status(self) -> ReplicaStatus:
        """Now; from any thread."""
        reading, stream = self.transport.reading, self._stream
        applied_seq = reading.applied_seq
        last_seq = 0 if stream is None else stream.last_seq
        manifest = None if self._checkpoints is None else self._checkpoints.manifest
        return ReplicaStatus(
            router_id=self.router_id,
            is_connected=self.connection.is_connected,
            is_ready=self._ready_after_s is not None,
            applied_seq=applied_seq,
            lag_messages=max(0, last_seq - self._done_seq),
            lag_s=self._lag.lag_s(self._done_seq),
            stream=stream,
            generation=0 if manifest is None else manifest.generation,
            snapshot_seq=None if manifest is None else manifest.seq,
            snapshot_bytes=None if manifest is None else manifest.size,
            num_snapshots=self._num_snapshots,
            num_reconnects=self.connection.num_reconnects,
            restored_bytes=self._restored_bytes,
            ready_after_s=self._ready_after_s,
            num_consumers=reading.num_consumers,
            num_rewound=reading.num_rewound,
            num_late_beats=reading.num_late,
            problems=self._shown_problems(reading.error),
            refused=self.connection.refused,
            differences=self._streams.differences,
            replicas=self._presence.others(),
            is_double=self._presence.is_double,
        )

    @property
    def _done_seq(self) -> int:
        """Up to where nothing is left to be applied, as it is applied or the stream has it no more:
        what is missing then shows by the numbers of publishers.
        """
        first_seq = 0 if self._stream is None else self._stream.first_seq
        return max(self.transport.applied_seq, first_seq - 1)

    def _shown_problems(self, reading_error: str | None) -> dict[Part, str]:
        problems = dict(self._problems)
        return problems if reading_error is None else {Part.CONSUMER: reading_error, **problems}

    def _with_state(self, said: ReplicaSaid) -> ReplicaSaid:
        manifest = None if self._checkpoints is None else self._checkpoints.manifest
        return msgspec.structs.replace(
            said,
            is_ready=self._ready_after_s is not None,
            applied_seq=self.transport.applied_seq,
            generation=0 if manifest is None else manifest.generation,
        )

    def _note_stream(self, state: StreamState) -> None:
        self._stream = state
        self._lag.note(state.last_seq)

    def _note_connection(self, is_connected: bool) -> None:
        if not self._is_stopping:
            self._note(Part.CONNECTION, None if is_connected else self._no_connection)
            self._has_connected = True

    @property
    def _no_connection(self) -> str:
        return f"no connection to {', '.join(self._settings.nats.servers)}"

    def _note(self, part: Part, problem: str | None) -> None:
        """Say it once; None: it is over."""
        if problem == self._problems.get(part):
            return
        if problem is not None:
            self._problems[part] = problem
            logger.warning("NATS: %s: %s", part, problem)
        elif (before := self._problems.pop(part)) and self._has_connected:
            logger.info("NATS: %s: resolved: %s", part, before)


def _sentence(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the event thread is busy"
    return str(error) if isinstance(error, KvplugError) else f"{type(error).__name__}: {error}"


def _say_failure(following: Future[None]) -> None:
    """Our own mistake, as what servers do is expected."""
    if not following.cancelled() and (error := following.exception()) is not None:
        logger.error("the replica follows no stream any more", exc_info=error)
