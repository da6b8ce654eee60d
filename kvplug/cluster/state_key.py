"""One key of a fleet's state bucket: read it, and replace it if nobody else has.

In:  a value, and the revision that it is to replace.   Out: the new revision; TransportError.

nats-py's KeyValue cannot renew a value that ends by itself (its `update` drops the time to live),
and reads from any replica of a bucket; these reads are answered by the leader.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import api

from kvplug.nats.connection import translated

NATS_ERRORS: Final = (nats.errors.Error, asyncio.TimeoutError, OSError)
"""What calls of nats-py raise."""

_OPERATION: Final = "KV-Operation"
_NO_MESSAGE: Final = 10037
_WRONG_REVISION: Final = (10071, 10164)


class Entry(NamedTuple):
    """value: None if there is none; revision: 0 if there never was one."""

    value: bytes | None
    revision: int


class StateKey:
    """read, replace, delete."""

    def __init__(self, client: Client, bucket: str, key: str, timeout_s: float = 5.0) -> None:
        self._js = client.jetstream(timeout=timeout_s)
        self._stream, self._subject, self._key = f"KV_{bucket}", f"$KV.{bucket}.{key}", key

    async def read(self) -> Entry:
        """As it is now."""
        try:
            message = await self._js.get_last_msg(self._stream, self._subject)
        except nats.js.errors.NotFoundError as error:
            if error.err_code == _NO_MESSAGE:
                return Entry(None, 0)
            raise translated(error, f"read the {self._key}") from error
        except NATS_ERRORS as error:
            raise translated(error, f"read the {self._key}") from error
        is_gone = _OPERATION in (message.headers or {})
        return Entry(None if is_gone else message.data or b"", message.seq or 0)

    async def replace(self, value: bytes, revision: int, ttl_s: int | None = None) -> int | None:
        """The new revision, which ends by itself after `ttl_s`; None if it is another one by now
        than `revision`.
        """
        return await self._publish(value, revision, {}, ttl_s)

    async def delete(self, revision: int) -> bool:
        """Whether it was that revision until now; what marks it as deleted ends by itself."""
        return await self._publish(b"", revision, {_OPERATION: "DEL"}, 1) is not None

    async def _publish(
        self, value: bytes, revision: int, headers: dict[str, str], ttl_s: int | None
    ) -> int | None:
        expected = {api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision)}
        try:
            ack = await self._js.publish(
                self._subject, value, headers=headers | expected, msg_ttl=ttl_s
            )
        except nats.js.errors.APIError as error:
            if error.err_code in _WRONG_REVISION:
                return None
            raise translated(error, f"replace the {self._key}") from error
        except NATS_ERRORS as error:
            raise translated(error, f"replace the {self._key}") from error
        return ack.seq
