"""One request to the replay socket of a stock event publisher.

In:  an endpoint and a number.   Out: the messages from that number on that the engine still has.

    we send   ["", 8-byte big-endian number]                       DEALER to ROUTER
    vLLM      ["", topic, 8-byte number, payload] *, then ["", "", -1 in 8 bytes, ""]
    older     ["", 8-byte number, payload] *, then the same with -1

SGLang's is the same. Seen on vLLM 0.32.0 and SGLang 0.5.23; without a topic before vllm#45177.
"""

from __future__ import annotations

from contextlib import suppress

import zmq

from kvplug.errors import TransportError

_MAX_MESSAGE_BYTES = 64 * 2**20
_END = b"\xff" * 8


class ZmqReplay:
    """An open request; `socket` is to be polled, `receive` takes what has arrived, then `close`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, start: int) -> None:
        """Ask for the messages from number `start` on; TransportError for a bad endpoint."""
        self.is_ended = False
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        # The engine drops what finds no room here, and its buffer has 10,000 messages by default.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(
                f"cannot ask for a replay at {endpoint!r}: expected an endpoint like "
                f"tcp://127.0.0.1:6557, got: {error}"
            ) from error
        self.socket.send_multipart([b"", start.to_bytes(8, "big")])

    def receive(self, max_messages: int) -> list[tuple[int, bytes]]:
        """Numbers and payloads that have arrived, without waiting; may set `is_ended`."""
        messages: list[tuple[int, bytes]] = []
        with suppress(zmq.Again):
            while len(messages) < max_messages and not self.is_ended:
                self._read(self.socket.recv_multipart(zmq.NOBLOCK), messages)
        return messages

    def close(self) -> None:
        """Close the socket; safe to call twice."""
        self.socket.close(linger=0)

    def _read(self, frames: list[bytes], messages: list[tuple[int, bytes]]) -> None:
        match frames:
            case [b"", number, payload] | [b"", _, number, payload] if len(number) == 8:
                if number == _END:
                    self.is_ended = True
                else:
                    messages.append((int.from_bytes(number, "big"), payload))
