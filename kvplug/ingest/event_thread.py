"""The thread that receives the events of all engines, over whatever transport.

In:  followers with their endpoints, added and removed from any thread.
Out: every follower gets what arrives, in order, one part at a time, and the time; replays that it
wants are asked for, and the answers are handed to it.

One thread polls all sources and a socket pair that wakes it for calls from other threads. Nothing
ends it but `stop`: a source that cannot be opened or that fails counts as disconnected and is
opened again after a pause, and whatever else fails in a round is logged, and the next round comes.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kvplug.errors import TransportError
from kvplug.ingest.asking import Asker, OpenRequest
from kvplug.ingest.dispatch import TopicDispatcher
from kvplug.ingest.replay import Request
from kvplug.topics import PREFIX, Topic
from kvplug.transports import (
    TRANSPORTS,
    TransportFactory,
    require_one_transport,
    scheme_of,
)
from kvplug.transports.base import (
    AskingSource,
    Connection,
    EventSource,
    Message,
    ReplayAnswer,
    Transport,
)

if TYPE_CHECKING:  # the forwarder needs no router
    from kvplug.ingest.follower import Follower

logger = logging.getLogger(__name__)

# ApplyResult at once; other threads get the interpreter in between. And per source and round, so
# that one busy engine does not keep the others waiting.
_MAX_MESSAGES: Final = 32
_MAX_PARTS_PER_ROUND: Final = 8
_TICK_S: Final = 0.2
_STOP_TIMEOUT_S: Final = 5.0
_CALL_TIMEOUT_S: Final = 5.0
# Between two attempts to open a source, doubled up to the limit: what is missing, a descriptor
# perhaps, may be missing for long.
_MIN_RETRY_S: Final = 0.5
_MAX_RETRY_S: Final = 10.0


_T = TypeVar("_T")


class Receiver(Protocol):
    """Who is fed with one source: a Follower, or a TopicDispatcher for many of them."""

    def on_connected(self) -> None:
        """A publisher is connected."""

    def on_disconnected(self) -> None:
        """A publisher is gone."""

    def receive(self, messages: list[Message]) -> None:
        """Messages in the order of their arrival."""

    def tick(self) -> None:
        """Time has passed."""


class Followed(Receiver, Asker, Protocol):
    """Who is fed with one publisher's messages, and may want some of them again: a Follower."""

    can_replay: bool
    can_ask_publisher: bool


class _Stream:
    """One source, who is fed with it, and the replays that are open."""

    def __init__(
        self,
        receiver: Followed | TopicDispatcher,
        open_source: Callable[[], EventSource],
        *,
        is_shared: bool = False,
    ) -> None:
        """`is_behind`: more may have arrived than a round took; a wake-up may not tell."""
        self.is_behind = False
        self._receiver, self._open, self._is_shared = receiver, open_source, is_shared
        self._source: EventSource | None = None
        self._requests: dict[Followed, OpenRequest] = {}
        self._filenos: dict[EventSource | ReplayAnswer, tuple[int, ...]] = {}
        self._retry_at_s, self._pause_s = 0.0, _MIN_RETRY_S

    @property
    def name(self) -> str:
        """For the log."""
        if isinstance(self._receiver, TopicDispatcher):
            return "all workers"
        return str(self._receiver.rank)

    def attach(self, source: EventSource, selector: selectors.BaseSelector) -> None:
        """Receive from this source from now on."""
        self._source = source
        self._register(source, selector)

    def detach(self, selector: selectors.BaseSelector) -> None:
        """Close the source and the replays."""
        for request in self._requests.values():
            request.close()
        self._requests.clear()
        source, self._source, self.is_behind = self._source, None, False
        if source is not None:
            self._close(source, selector)

    def fail(self, selector: selectors.BaseSelector) -> None:
        """Begin anew after a pause, which grows until messages are received."""
        self._retry_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_RETRY_S)
        self.detach(selector)
        if isinstance(self._receiver, TopicDispatcher):
            self._receiver.on_all_disconnected()
        else:
            self._receiver.on_disconnected()

    def serve(self, selector: selectors.BaseSelector, *, is_tick: bool) -> None:
        """Hand over what has arrived, and the time."""
        if self._source is None and time.monotonic() >= self._retry_at_s:
            self.attach(self._open(), selector)
        if self._source is not None:
            self._receive(self._source, selector)
        if is_tick:
            self._receiver.tick()
        if self._source is not None:
            self._serve_replays(self._source, selector, is_tick=is_tick)

    def _receive(self, source: EventSource, selector: selectors.BaseSelector) -> None:
        for change in source.connection_changes():
            if change is Connection.OPENED:
                self._receiver.on_connected()
            elif isinstance(self._receiver, TopicDispatcher) and change is Connection.INTERRUPTED:
                self._receiver.on_interrupted()
            elif isinstance(self._receiver, TopicDispatcher) and change is Connection.RESUMED:
                self._receiver.on_resumed()
            elif self._is_shared:
                self._receiver.on_disconnected()
            else:
                self._renew(selector)
                return
        self.is_behind = not self._receive_all(source)

    def _receive_all(self, source: EventSource) -> bool:
        """Whether there is no more."""
        for _ in range(_MAX_PARTS_PER_ROUND):
            messages = source.receive(_MAX_MESSAGES)
            if messages:
                self._receiver.receive(messages)
                self._pause_s = _MIN_RETRY_S
            if len(messages) < _MAX_MESSAGES:
                return True
        return False

    def _renew(self, selector: selectors.BaseSelector) -> None:
        # What the former incarnation still had queued must not mix with the next one's.
        self.detach(selector)
        self._receiver.on_disconnected()
        self.attach(self._open(), selector)

    def _serve_replays(
        self, source: EventSource, selector: selectors.BaseSelector, *, is_tick: bool
    ) -> None:
        for follower in self._askers(source, is_tick=is_tick):
            request = self._requests.get(follower)
            if request is None:
                if follower.replay_request is None:
                    continue
                request = self._requests[follower] = self._request_of(follower, source, selector)
            self.is_behind |= request.serve(_MAX_MESSAGES)
            if not request.is_open:
                del self._requests[follower]

    def _askers(self, source: EventSource, *, is_tick: bool) -> Iterable[Followed]:
        """Who may want something: of many followers those with news, and at each tick all."""
        if not isinstance(self._receiver, TopicDispatcher):
            return (self._receiver,)
        if not isinstance(source, AskingSource):
            return ()
        touched = self._receiver.take_touched()
        return self._receiver.followers if is_tick else touched | self._requests.keys()

    def _request_of(
        self, follower: Followed, source: EventSource, selector: selectors.BaseSelector
    ) -> OpenRequest:
        def ask(request: Request) -> ReplayAnswer:
            if isinstance(self._receiver, TopicDispatcher):
                assert isinstance(source, AskingSource)
                return source.ask(self._receiver.topic_of(follower), request.payload)
            return source.request_replay(request.payload, request.endpoint)

        return OpenRequest(
            follower,
            ask,
            lambda answer: self._register(answer, selector),
            lambda answer: self._close(answer, selector),
        )

    def forget(self, follower: Followed) -> None:
        """It wants nothing any more."""
        request = self._requests.pop(follower, None)
        if request is not None:
            request.close()

    def _register(
        self, opened: EventSource | ReplayAnswer, selector: selectors.BaseSelector
    ) -> None:
        self._filenos[opened] = opened.filenos()
        for fileno in self._filenos[opened]:
            selector.register(fileno, selectors.EVENT_READ, self)

    def _close(self, opened: EventSource | ReplayAnswer, selector: selectors.BaseSelector) -> None:
        # Before it is closed: another socket may get its descriptor.
        for fileno in self._filenos.pop(opened, ()):
            with suppress(KeyError):
                selector.unregister(fileno)
        opened.close()


class EventThread:
    """start, follow, bind, follow_topic, unfollow, call, stop; is_alive."""

    def __init__(self, transports: Mapping[str, TransportFactory] = TRANSPORTS) -> None:
        """`transports`: by the scheme of their endpoints; `transports_with(keys)` has encrypted
        ones.
        """
        self._factories = dict(transports)
        self._transports: dict[TransportFactory, Transport] = {}
        self._lock = threading.Lock()
        self._streams: dict[Followed | TopicDispatcher, _Stream] = {}
        self._dispatcher: TopicDispatcher | None = None
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._next_tick_s = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvplug-events", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether events are received: from `start` to `stop`."""
        return self._thread.is_alive()

    @property
    def dispatcher(self) -> TopicDispatcher | None:
        """What came over the bound endpoint; None without one."""
        return self._dispatcher

    def start(self) -> None:
        """Begin to receive; the first of all calls."""
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread.start()

    def follow(
        self, follower: Followed, endpoint: str, topic: str = "", replay: str | None = None
    ) -> None:
        """Subscribe; `replay` is the endpoint where the engine sends again what it sent before, by
        default the transport's own, if it has one.

        Raises TransportError for an endpoint that no transport understands, and for endpoints of
        two transports.
        """
        for each in filter(None, (endpoint, replay)):
            self._transport_of(each).check(each)
        if replay is not None:
            require_one_transport(endpoint, replay, self._factories)
        replay = replay or self._transport_of(endpoint).replay_of(endpoint)
        follower.can_replay = replay is not None
        follower.can_ask_publisher = True
        connect = self._transport_of(endpoint).connect
        self._submit(lambda: self._add(follower, lambda: connect(endpoint, topic, replay)))

    def bind(self, endpoint: str, topic: str = PREFIX) -> str:
        """Let publishers connect to this endpoint; returns it with the port that was taken.

        `topic` narrows what is received to topics that begin with it. TransportError if it cannot
        be bound. Once per thread.
        """
        bind, dispatcher = self._transport_of(endpoint).bind, TopicDispatcher()

        def open_first() -> str:
            source, taken = bind(endpoint, topic)
            stream = _Stream(dispatcher, lambda: bind(taken, topic)[0], is_shared=True)
            self._streams[dispatcher] = stream
            stream.attach(source, self._selector)
            dispatcher.can_ask = isinstance(source, AskingSource)
            self._dispatcher = dispatcher
            return taken

        return self.call(open_first)

    def follow_topic(self, follower: Follower, topic: Topic) -> None:
        """Hand the messages of a publisher that connects to `bind`'s endpoint to the follower.

        ConfigError if another one has the topic.
        """
        dispatcher = self._dispatcher
        assert dispatcher is not None, "bind first"
        self.call(lambda: dispatcher.add(follower, topic))

    def unfollow(self, follower: Followed) -> None:
        """Hand nothing more to the follower, once this returns."""
        if self.is_alive:
            self.call(lambda: self._remove(follower))

    def call(self, call: Callable[[], _T], *, timeout_s: float = _CALL_TIMEOUT_S) -> _T:
        """Run it in the thread that receives, between two messages, and return its result.

        What it raises is raised here; TimeoutError if it has not ended in time, and it may still
        run then. TransportError if the thread does not run.
        """
        if not self.is_alive:
            raise TransportError("the event thread does not run: expected a call after start")
        return self._submit(call).result(timeout_s)

    def stop(self) -> None:
        """End the thread, which closes everything; it is left alone if that takes long."""
        if not self._thread.is_alive():
            return
        self._submit(self._end)
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the event thread is busy: it closes its sockets when it is not")

    def _transport_of(self, endpoint: str) -> Transport:
        if not self.is_alive:  # nobody would close it
            raise TransportError("the event thread does not run: expected a call after start")
        factory = self._factories[scheme_of(endpoint, list(self._factories))]
        with self._lock:
            if factory not in self._transports:
                self._transports[factory] = factory()
            return self._transports[factory]

    # -- calls from other threads --

    def _submit(self, call: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._calls.put(lambda: _run_into(future, call))
        with suppress(OSError):  # full: it is awake already; closed: the thread has ended
            self._wake_write.send(b"\0")
        return future

    def _add(self, receiver: Followed, open_source: Callable[[], EventSource]) -> None:
        self._streams[receiver] = _Stream(receiver, open_source)
        self._serve(self._streams[receiver], is_tick=True)

    def _remove(self, follower: Followed) -> None:
        stream = self._streams.pop(follower, None)
        if stream is not None:
            stream.detach(self._selector)
        elif self._dispatcher is not None:
            self._dispatcher.remove(follower)
            self._streams[self._dispatcher].forget(follower)

    def _end(self) -> None:
        self._stopping = True

    # -- the thread --

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_round()
        finally:
            self._close_all()

    def _run_round(self) -> None:
        try:
            woken = self._wait()
            while not self._calls.empty():
                self._calls.get()()
            is_tick = self._is_tick()
            for stream in list(self._streams.values()):
                if is_tick or stream.is_behind or stream in woken:
                    self._serve(stream, is_tick=is_tick)
        except Exception:
            logger.exception("a round of the event thread failed, the next one follows")
            time.sleep(_TICK_S)  # whatever it is, it must not become a busy loop

    def _wait(self) -> set[_Stream]:
        is_behind = any(stream.is_behind for stream in self._streams.values())
        ready = self._selector.select(0 if is_behind else _TICK_S)
        with suppress(BlockingIOError):
            self._wake_read.recv(4096)
        return {key.data for key, _ in ready if key.data is not None}

    def _is_tick(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_tick_s:
            return False
        self._next_tick_s = now_s + _TICK_S
        return True

    def _serve(self, stream: _Stream, *, is_tick: bool) -> None:
        try:
            stream.serve(self._selector, is_tick=is_tick)
        except Exception as error:  # one that fails must not deafen the others
            is_foreign = isinstance(error, TransportError)
            text = "%s: following its events failed, starting over: %s"
            logger.warning(text, stream.name, error, exc_info=not is_foreign)
            self._restart(stream)

    def _restart(self, stream: _Stream) -> None:
        try:
            stream.fail(self._selector)
        except Exception:
            logger.exception("%s: its failure could not be noted", stream.name)

    def _close_all(self) -> None:
        # Here, as a socket that another thread closes is an error in the middle of its use.
        for stream in self._streams.values():
            with suppress(Exception):
                stream.detach(self._selector)
        for transport in self._transports.values():
            with suppress(Exception):
                transport.close()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()


def _run_into(future: Future[_T], call: Callable[[], _T]) -> None:
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 - raised in the thread that called
        future.set_exception(error)
