"""Snapshots in a bucket of NATS' object store: whole, or refused.

In:  a name, bytes.   Out: the same bytes in one buffer; names; TransportError, BrokenObjectError.

The objects are those of every NATS client (`nats object ls`): chunks on a subject of their own,
then a message that says what the object is. nats-py's own get() adds bytes to bytes, which takes
time by the square of the size, and waits for a missing chunk for ever.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import secrets
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from kvplug.errors import SnapshotError, TransportError
from kvplug.nats.connection import translated

CHUNK_NBYTES: Final = 512 * 1024
"""NATS takes messages of up to 1 MiB."""

_NUM_IN_FLIGHT: Final = 8
_CHUNKS_PER_READ: Final = 32
_END_OF_BATCH: Final = "204"
_ENDS: Final = (_END_OF_BATCH, "404")  # 404: there is no such chunk
_DIGEST: Final = "SHA-256="
_ERRORS: Final = (nats.errors.Error, asyncio.TimeoutError, OSError)


class BrokenObjectError(SnapshotError):
    """The object is not there any more, or it is not what was put."""


class StoredObject(msgspec.Struct, frozen=True):
    """As the object store's other clients write it; nuid: the last token of its chunks' subject."""

    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    options: dict[str, int] = {}
    mtime: str = ""
    deleted: bool = False


class _Found(NamedTuple):
    """time: when the server took it, by the server's clock."""

    stored: StoredObject
    time: datetime


class SnapshotObjects:
    """put, get, names, delete, delete_broken."""

    def __init__(self, client: Client, bucket: str, timeout_s: float = 10.0) -> None:
        """`timeout_s`: of each wait for the server."""
        self._client, self._bucket, self._timeout_s = client, bucket, timeout_s
        self._js = client.jetstream(timeout=timeout_s)
        self._stream = f"OBJ_{bucket}"

    async def put(self, name: str, data: memoryview) -> None:
        """Upload it and look that the server has all of it; BrokenObjectError if it has not."""
        try:
            await self._put(name, data)
        except _ERRORS as error:
            raise translated(error, f"put the snapshot {name}") from error

    async def get(self, name: str) -> bytearray:
        """The whole object; BrokenObjectError if it is gone, damaged, or lacks a chunk."""
        try:
            return await self._get(name)
        except nats.js.errors.NotFoundError as error:
            raise BrokenObjectError(f"there is no snapshot {name} any more") from error
        except _ERRORS as error:
            raise translated(error, f"get the snapshot {name}") from error

    async def names(self) -> list[str]:
        """Of all objects, sorted."""
        prefix = self._subject_of("M", "")
        try:
            subjects = await self._subjects(f"{prefix}>")
        except _ERRORS as error:
            raise translated(error, "list the snapshots") from error
        return sorted(filter(None, (_decoded(each[len(prefix) :]) for each in subjects)))

    async def delete(self, name: str) -> None:
        """Nothing is left of it; one that is gone already is no error."""
        meta = self._meta_subject(name)
        try:
            found = await self._find(name)
            await self._js.purge_stream(self._stream, subject=meta)
            await self._js.purge_stream(self._stream, subject=self._chunks_of(found.stored.nuid))
        except nats.js.errors.NotFoundError:
            return
        except _ERRORS as error:
            raise translated(error, f"delete the snapshot {name}") from error

    async def delete_broken(self, older_than_s: float, than: str) -> int:
        """Chunks of uploads that never ended, which no object names: if the last one came so long
        before the object `than`, by the server's clock. Returns how many uploads those were.
        """
        try:
            return await self._delete_broken(timedelta(seconds=older_than_s), than)
        except nats.js.errors.NotFoundError:
            return 0
        except _ERRORS as error:
            raise translated(error, "delete broken uploads") from error

    async def _put(self, name: str, data: memoryview) -> None:
        nuid = secrets.token_hex(11)
        subject = self._chunks_of(nuid)
        digest = asyncio.create_task(asyncio.to_thread(_digest_of, data))
        chunks = [data[at : at + CHUNK_NBYTES] for at in range(0, len(data), CHUNK_NBYTES)]
        for at in range(0, len(chunks), _NUM_IN_FLIGHT):
            run = chunks[at : at + _NUM_IN_FLIGHT]
            await asyncio.gather(*[self._publish(subject, bytes(each)) for each in run])
        stored = StoredObject(
            name, self._bucket, nuid, len(data), len(chunks), await digest,
            {"max_chunk_size": CHUNK_NBYTES},
        )  # fmt: skip
        await self._publish(self._meta_subject(name), msgspec.json.encode(stored))
        await self._verify(stored)

    async def _publish(self, subject: str, payload: bytes) -> None:
        await self._js.publish(subject, payload, timeout=self._timeout_s)

    async def _verify(self, stored: StoredObject) -> None:
        found, subject = await self._find(stored.name), self._chunks_of(stored.nuid)
        num_chunks = (await self._subjects(subject)).get(subject, 0)
        if found.stored != stored or num_chunks != stored.chunks:
            raise BrokenObjectError(
                f"cannot put the snapshot {stored.name}: expected {stored.chunks} chunks of "
                f"{stored.size} bytes, the server has {num_chunks} of {found.stored.size}"
            )

    async def _get(self, name: str) -> bytearray:
        stored = (await self._find(name)).stored
        await self._require_chunks(stored)
        data = bytearray(stored.size)
        reading = _Reading(memoryview(data))
        inbox = self._client.new_inbox()
        # nats-py drops what is beyond a limit of its own; what is asked for is the limit here.
        subscription = await self._client.subscribe(
            inbox, cb=reading.take, pending_msgs_limit=0, pending_bytes_limit=0
        )
        try:
            while not reading.is_done:
                await self._ask(self._chunks_of(stored.nuid), reading, inbox)
        finally:
            await subscription.unsubscribe()
        digest = await asyncio.to_thread(_digest_of, memoryview(data))
        if reading.at != stored.size or digest != stored.digest:
            raise BrokenObjectError(
                f"the snapshot {name} is damaged: expected {stored.size} bytes with digest "
                f"{stored.digest}, got {reading.at} with {digest}"
            )
        return data

    async def _require_chunks(self, stored: StoredObject) -> None:
        """Room is made for its size, so that must be what the server can have."""
        subject = self._chunks_of(stored.nuid)
        num_chunks = (await self._subjects(subject)).get(subject, 0)
        if not 0 <= stored.size <= num_chunks * CHUNK_NBYTES:
            raise BrokenObjectError(
                f"the snapshot {stored.name} is damaged: expected {stored.size} bytes, the server "
                f"has {num_chunks} chunks of it"
            )

    async def _ask(self, subject: str, reading: _Reading, inbox: str) -> None:
        """For the next chunks; returns when they are there."""
        reading.batch_ended.clear()
        request = {"seq": reading.next_seq, "next_by_subj": subject, "batch": _CHUNKS_PER_READ}
        direct_get = f"$JS.API.DIRECT.GET.{self._stream}"
        await self._client.publish(direct_get, msgspec.json.encode(request), reply=inbox)
        await asyncio.wait_for(reading.batch_ended.wait(), self._timeout_s)
        if reading.failure:
            raise TransportError(f"cannot get chunks of a snapshot: {reading.failure}")

    async def _find(self, name: str) -> _Found:
        message = await self._js.get_last_msg(self._stream, self._meta_subject(name))
        try:
            stored = msgspec.json.decode(message.data or b"", type=StoredObject)
        except msgspec.MsgspecError as error:
            raise BrokenObjectError(f"what is said of the snapshot {name} is damaged") from error
        if stored.deleted:
            raise nats.js.errors.NotFoundError
        return _Found(stored, _time_of(message))

    async def _subjects(self, filter_: str) -> dict[str, int]:
        """Number of messages by subject."""
        info = await self._js.stream_info(self._stream, subjects_filter=filter_)
        return info.state.subjects or {}

    async def _delete_broken(self, age: timedelta, than: str) -> int:
        newest = (await self._find(than)).time
        chunks = await self._subjects(self._subject_of("C", ">"))
        named = {
            self._chunks_of((await self._find(each)).stored.nuid) for each in await self.names()
        }
        num_deleted = 0
        for subject in chunks.keys() - named:
            last = _time_of(await self._js.get_last_msg(self._stream, subject))
            if newest - last > age:
                await self._js.purge_stream(self._stream, subject=subject)
                num_deleted += 1
        return num_deleted

    def _chunks_of(self, nuid: str) -> str:
        return self._subject_of("C", nuid)

    def _meta_subject(self, name: str) -> str:
        return self._subject_of("M", base64.urlsafe_b64encode(name.encode()).decode())

    def _subject_of(self, kind: str, rest: str) -> str:
        return f"$O.{self._bucket}.{kind}.{rest}"


class _Reading:
    """Chunks as they arrive, into a buffer. at: bytes of chunks so far, also if they do not fit."""

    def __init__(self, into: memoryview) -> None:
        self._into = into
        self.at, self.next_seq = 0, 1
        self.is_done, self.failure = not len(into), ""
        self.batch_ended = asyncio.Event()

    async def take(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        if status is not None:
            if status not in _ENDS:
                self.failure = f"{status} {headers.get('Description', '')}".rstrip()
            self.is_done = status != _END_OF_BATCH or headers.get("Nats-Num-Pending") == "0"
            self.batch_ended.set()
            return
        self.next_seq, left = int(headers["Nats-Sequence"]) + 1, max(0, len(self._into) - self.at)
        self._into[self.at : self.at + len(message.data)] = message.data[:left]
        self.at += len(message.data)


def _digest_of(data: memoryview) -> str:
    return _DIGEST + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()


def _decoded(token: str) -> str:
    """The name in a subject; nothing for what is none."""
    try:
        return base64.urlsafe_b64decode(token).decode()
    except (binascii.Error, ValueError):
        return ""


def _time_of(message: api.RawStreamMsg) -> datetime:
    time = message.time
    if isinstance(time, datetime):
        return time
    raise TransportError("a message of the object store has no time")
