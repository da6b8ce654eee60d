"""Clients of streams that cost little, so that thousands fit beside a router.

In:  a router's URL.   Out: what became of each stream, as its user has it.
"""

import asyncio
import json
import re
from urllib.parse import urlsplit

WHOLE, ERROR_EVENT = "whole", "error event"
FIRST_EVENT = b"data: "
EVENT = re.compile(rb"^data: (\{.*\})$", re.MULTILINE)
STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")


class RawStream:
    """open, then read_first and read_rest, or cancel."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer
        self.received = b""

    @classmethod
    async def open(cls, url, **body):
        """Send a request for a stream."""
        parts = urlsplit(url)
        stream = cls(*await asyncio.open_connection(parts.hostname, parts.port))
        asked = json.dumps({"model": "m", "prompt": [1, 2, 3], "stream": True, **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(asked)}\r\n"
        stream._writer.write(head.encode() + b"Connection: close\r\n\r\n" + asked)
        return stream

    async def read_first(self):
        """Up to the first event."""
        while FIRST_EVENT not in self.received:
            part = await self._reader.read(65536)
            if not part:
                raise ConnectionError(f"no event: {self.received[:300]!r}")
            self.received += part

    async def read_rest(self):
        """`whole`, `error event`, the status if it is no 200, or how else it ended."""
        try:
            self.received += await self._reader.read()
        except ConnectionError as error:
            return type(error).__name__
        finally:
            self._writer.close()
        status = STATUS.match(self.received)
        if status is None or status[1] != b"200":
            return f"status {status[1].decode()}" if status else "no answer"
        if b"data: [DONE]" in self.received:
            return WHOLE
        return ERROR_EVENT if b'data: {"error"' in self.received else "broken off"

    def text(self):
        """Of all events."""
        chunks = [json.loads(event) for event in EVENT.findall(self.received)]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk.get("choices"))

    def cancel(self):
        """As a user who closes the page."""
        self._writer.transport.abort()
