"""The stream of events and the two buckets on the servers: made if they are missing.

In:  a connection, how large and how safe they are to be.   Out: what is there, what differs.

    kvplug-FLEET             stream: hellos, events and marks of an hour, the oldest go first
    kvplug-FLEET-state       key-value bucket: the manifest of snapshots, the lease on making one
    kvplug-FLEET-snapshots   object store: the snapshots

What is there already is used as it is, whoever made it: an operator may have other limits, and
routers may lack the permission to make anything.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
import nats.errors
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError

from kvplug.errors import TransportError
from kvplug.nats.connection import NatsConnection, translated
from kvplug.nats.subjects import Subjects

logger = logging.getLogger(__name__)

# NATS allows no less. Nobody sends message ids: publishers number what they say.
_DUPLICATE_WINDOW_S: Final = 0.1
_TIMEOUT_S: Final = 5.0
_NAME_IN_USE: Final = 10058

_Maker = Callable[[], Awaitable[object]]


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of what is made. num_replicas: servers with a copy, 1, 3 or 5; max_bytes, max_age_s: limits
    of the stream of events, beyond which the oldest go.
    """

    num_replicas: int = 1
    max_bytes: int = 2**30
    max_age_s: float = 3600.0


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """created: when it was made, which tells a stream from one that was made anew; first_seq: of
    the oldest message that it may have, last_seq of the youngest, 0 if there never was one.
    """

    created: str
    first_seq: int
    last_seq: int
    num_messages: int
    num_bytes: int
    max_age_s: float = 0.0


class Streams:
    """ensure, state, mark, in the connection's loop; `differences` from what would have been made.

    All raise TransportError, with what to do where that is known.
    """

    def __init__(
        self, connection: NatsConnection, subjects: Subjects, settings: StreamSettings
    ) -> None:
        self._connection, self._subjects, self._settings = connection, subjects, settings
        self.differences: tuple[str, ...] = ()

    async def ensure(self) -> StreamState:
        """Make what is missing."""
        js = await self._context()
        info = await self._found_or_made(js, self._events())
        self._note_differences(info)
        for name, make in self._buckets(js).items():
            if await _info(js, name) is None:
                await _made(name, make)
        return _state(info)

    async def state(self) -> StreamState | None:
        """Of the stream of events now; None if it is gone."""
        info = await _info(await self._context(), self._subjects.stream)
        return None if info is None else _state(info)

    async def mark(self) -> int:
        """Add a message that says nothing; returns its number in the stream."""
        js = await self._context()
        try:
            return (await js.publish(self._subjects.marks, b"")).seq
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise _refusal(error, f"publish to {self._subjects.marks}") from error

    async def _context(self) -> JetStreamContext:
        client = await self._connection.connected()
        return client.jetstream(timeout=_TIMEOUT_S)

    async def _found_or_made(
        self, js: JetStreamContext, config: api.StreamConfig
    ) -> api.StreamInfo:
        name = self._subjects.stream
        info = await _info(js, name)
        if info is None:
            await _made(name, lambda: js.add_stream(config))
            info = await _info(js, name)
        if info is None:
            raise TransportError(f"cannot use stream {name}: it was made, and is gone again")
        return info

    def _events(self) -> api.StreamConfig:
        settings = self._settings
        return api.StreamConfig(
            name=self._subjects.stream,
            description="events of engines, for kvplug's routers",
            subjects=[self._subjects.all_events, self._subjects.marks],
            retention=api.RetentionPolicy.LIMITS,
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.OLD,
            max_age=settings.max_age_s,
            max_bytes=settings.max_bytes,
            num_replicas=settings.num_replicas,
            allow_direct=True,
            duplicate_window=min(_DUPLICATE_WINDOW_S, settings.max_age_s),
        )

    def _buckets(self, js: JetStreamContext) -> dict[str, _Maker]:
        """By the name of its stream, what makes it."""
        subjects, replicas = self._subjects, self._settings.num_replicas
        state = api.KeyValueConfig(bucket=subjects.state_bucket, history=1, replicas=replicas)
        objects = api.ObjectStoreConfig(replicas=replicas)
        return {
            f"KV_{subjects.state_bucket}": lambda: js.create_key_value(state),
            f"OBJ_{subjects.snapshot_bucket}": lambda: js.create_object_store(
                subjects.snapshot_bucket, objects
            ),
        }

    def _note_differences(self, info: api.StreamInfo) -> None:
        seen, wanted = info.config, self._events()
        if self._subjects.all_events not in (seen.subjects or []):
            raise TransportError(
                f"cannot use stream {wanted.name}: expected the subjects {wanted.subjects}, it has "
                f"{seen.subjects}; delete it, or name another fleet with --nats-fleet"
            )
        names = ("retention", "storage", "discard", "max_age", "max_bytes", "num_replicas")
        found = [
            f"{name}: expected {_plain(getattr(wanted, name))}, seen {_plain(getattr(seen, name))}"
            for name in names
            if getattr(seen, name) != getattr(wanted, name)
        ]
        if tuple(found) != self.differences:
            self.differences = tuple(found)
            if found:
                text = "NATS: stream %s is used as it is: %s; nats stream edit %s changes it"
                logger.info(text, wanted.name, ", ".join(found), wanted.name)


async def _info(js: JetStreamContext, name: str) -> api.StreamInfo | None:
    try:
        return await js.stream_info(name)
    except NotFoundError:
        return None
    except (nats.errors.Error, OSError, TimeoutError) as error:
        raise _refusal(error, f"look at stream {name}") from error


async def _made(name: str, make: _Maker) -> None:
    """One that was made by another router in between is as good."""
    try:
        await make()
    except (nats.errors.Error, OSError, TimeoutError) as error:
        if not (isinstance(error, APIError) and error.err_code == _NAME_IN_USE):
            raise _refusal(error, f"make stream {name}") from error


def _refusal(error: Exception, attempted: str) -> TransportError:
    """With the usual cause of what NATS does not explain."""
    if isinstance(error, (nats.errors.TimeoutError, TimeoutError)):
        return TransportError(
            f"cannot {attempted}: no answer within {_TIMEOUT_S:g} s; the servers may have no "
            "leader, or this router no permission (docs/security.md)"
        )
    no_jetstream = isinstance(error, nats.errors.NoRespondersError)
    if no_jetstream or "ServiceUnavailable" in type(error).__name__:
        return TransportError(
            f"cannot {attempted}: the servers have no JetStream, or no leader yet; start "
            "nats-server with -js, or jetstream in its configuration"
        )
    return translated(error, attempted)


def _state(info: api.StreamInfo) -> StreamState:
    return StreamState(
        created=str(info.created),
        first_seq=info.state.first_seq,
        last_seq=info.state.last_seq,
        num_messages=info.state.messages,
        num_bytes=info.state.bytes,
        max_age_s=info.config.max_age or 0.0,
    )


def _plain(value: object) -> object:
    return getattr(value, "value", value)
