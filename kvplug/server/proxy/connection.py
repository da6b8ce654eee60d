"""One connection to a worker: a request goes out, its answer comes in.

In:  the bytes of a request, the bytes that the worker sends.   Out: status, headers, the body as a
whole or part by part, or an error that says whose fault it is: LostError is the worker's, ApiError
the answer's.

aiohttp's client costs a router three times its own work per request, and a task switch per chunk
of a stream (docs/decisions.md, 103). Here a part goes from `data_received` to its sink at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

import httptools

from kvplug.api_errors import ApiError

Headers = list[tuple[bytes, bytes]]
Sink = Callable[[bytes], None]

_MAX_HEAD_BYTES: Final = 2**16
_FIRST_STATUS: Final = 100
_FIRST_FINAL_STATUS: Final = 200


class LostError(Exception):
    """The worker did not answer; `was_reached`: it may have begun to work on the request."""

    def __init__(self, reason: str, *, was_reached: bool) -> None:
        super().__init__(reason)
        self.was_reached = was_reached


class Connection(asyncio.Protocol):
    """ask; then whole, or pass_parts and wait. `status` and `headers` are of the answer."""

    def __init__(self, max_silence_s: float) -> None:
        self.status, self.headers = 0, cast(Headers, [])
        self.is_open, self.has_ended, self.is_reusable = False, False, False
        self._max_silence_s = max_silence_s
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._sink: Sink | None = None
        self._error: LostError | ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_idle = True
        self._is_paused = False

    async def ask(self, head: bytes, body: bytes) -> None:
        """Send a request, and wait for the head of its answer. LostError, ApiError."""
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers, self._parts, self._num_head_bytes = 0, [], [], 0
        self._is_idle = self.has_ended = self.is_reusable = False
        self._heard_s = self._loop.time()
        self._set_timer(self._max_silence_s, self._check_silence)
        if not self.is_open:
            raise LostError("the connection was closed", was_reached=True)
        self._transport.writelines((head, body))
        while not self.status:
            await self.wait()

    async def wait(self) -> None:
        """Until the answer has begun, has ended, or `wake` was called. LostError, ApiError."""
        self._raise_error()
        if not self.has_ended:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            self._raise_error()

    def wake(self) -> None:
        """End a wait."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def whole(self) -> bytes:
        """The rest of the answer's body."""
        while not self.has_ended:
            await self.wait()
        return self.take()

    def take(self) -> bytes:
        """What has come of the body and went to no sink."""
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def pass_parts(self, sink: Sink) -> None:
        """From now on call `sink` with what comes of the body."""
        self._sink = sink

    @property
    def has_spoken(self) -> bool:
        """Whether any byte of an answer came."""
        return self._num_head_bytes > 0

    def pause(self) -> None:
        """Read no more: whoever the answer is for is slower than the worker."""
        if self.is_open and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again. The worker's silence counts from now on."""
        if self._is_paused:
            self._is_paused, self._heard_s = False, self._loop.time()
            if self.is_open:
                self._transport.resume_reading()

    def rest(self, at_most_s: float) -> None:
        """The answer is done with; close the connection if nobody asks within this time."""
        self._is_idle, self._sink, self._parts = True, None, []
        self.resume()  # a whole answer may have come at once, to a client that is slow
        self._set_timer(at_most_s, self.close)

    def close(self) -> None:
        """At once: a worker whose request has not ended notices, and stops to work on it."""
        self._clear_timer()
        self._sink = None
        if self.is_open:
            self.is_open = False
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:  # noqa: D102
        if self._is_idle:  # an answer to nothing
            self.close()
            return
        self._heard_s = self._loop.time()
        if not self.status:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(_invalid(str(error.__context__ or error)))
        if self._num_head_bytes > _MAX_HEAD_BYTES and not self.status:
            self._fail(_invalid("its headers are too long"))
        if self._sink is not None and self._parts:
            self._sink(self.take())
        if self.has_ended or self._sink is None:
            self.wake()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self.is_open = False
        if self._is_idle or self.has_ended:
            self._clear_timer()
        elif self.status and exc is None and not self._has_length:
            self.has_ended = True  # the end of the connection is the end of the answer
            self.wake()
        else:
            reason = str(exc) if exc is not None else "it closed the connection"
            self._fail(LostError(reason or type(exc).__name__, was_reached=True))

    def on_message_begin(self) -> None:  # noqa: D102
        if self.has_ended:
            self.is_reusable = False
            raise ValueError("there is more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: D102
        if not self.status:  # else of a trailer, which is no part of the head (RFC 9110, 6.5.1)
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:  # noqa: D102
        status = self._parser.get_status_code()
        if status < _FIRST_STATUS:  # no final one would have to follow
            raise ValueError(f"its status is {status:03}")
        if status < _FIRST_FINAL_STATUS:
            self.headers = []
            return
        if sum(len(name) + len(value) for name, value in self.headers) > _MAX_HEAD_BYTES:
            raise ValueError("its headers are too long")
        self.status = status

    def on_body(self, part: bytes) -> None:  # noqa: D102
        self._parts.append(part)

    def on_message_complete(self) -> None:  # noqa: D102
        if self.status:
            self.has_ended = True
            # A worker that answers before it has read the request may never read the rest.
            is_sent = not self.is_open or self._transport.get_write_buffer_size() == 0
            self.is_reusable = is_sent and self._parser.should_keep_alive()
            self._clear_timer()

    @property
    def _has_length(self) -> bool:
        names = {name.lower() for name, _ in self.headers}
        return b"content-length" in names or b"transfer-encoding" in names

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: LostError | ApiError) -> None:
        if self._error is None and not self.has_ended:
            self._error = error
        self.is_reusable = False
        self.close()
        self.wake()

    def _check_silence(self) -> None:
        """A timer for each chunk would cost more than the chunk."""
        if self._is_paused:
            self._heard_s = self._loop.time()
        left_s = self._heard_s + self._max_silence_s - self._loop.time()
        if left_s > 0:
            self._set_timer(left_s, self._check_silence)
            return
        # It took the request and is silent: sending it elsewhere would do the work twice.
        self._fail(ApiError(504, "the worker did not answer in time", code="timeout"))

    def _set_timer(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._clear_timer()
        self._timer = self._loop.call_later(delay_s, callback)

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _invalid(reason: str) -> ApiError:
    message = f"the worker's answer is no HTTP that the router understands: {reason}"
    return ApiError(502, message, code="invalid_answer")
