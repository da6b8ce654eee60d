"""What stands between an engine's events and a router, and does not always do its duty.

In:  the messages of a PUB socket, fault plans, orders to cut and restore the connection.
Out: the same frames on a PUB socket of its own, less, twice, later or in another order; counts.

The engine's replay socket is left alone: a router asks it directly. When the engine's side goes,
so does the router's, as it would without a proxy; `hides_restarts` keeps it open instead, as a
broker between the two would.
"""

import queue
import socket
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future

import zmq
from zmq.utils.monitor import recv_monitor_message

from tests.chaos.faults import NO_FAULTS, Fault
from tests.ingest.publisher import bind

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_RECONNECT_MS = 50
_LIMIT_S = 10.0


class EventProxy:
    """A context manager. All sockets belong to its thread; every order is done when it returns.

    Read: endpoint, counts (by Fault, and "cut off"), num_seen, is_upstream_connected,
    has_subscriber, restored_at (time.monotonic() of each time the way was opened).
    """

    def __init__(self, upstream, *, hides_restarts=False):
        self._upstream_endpoint, self._hides_restarts = upstream, hides_restarts
        self._port, self._plan = 0, NO_FAULTS
        self._outbox = deque()  # (due time, frames), in order
        self._held = []  # [messages still to pass it, frames]
        self._orders = queue.SimpleQueue()
        self._is_running, self._is_cut = True, False
        self._downstream = None
        self.counts, self.num_seen, self.restored_at = Counter(), 0, []
        self.is_upstream_connected = self.has_subscriber = False

    @property
    def endpoint(self):
        return f"tcp://127.0.0.1:{self._port}"

    def inject(self, plan):
        """From the next message on, do what the plan says."""
        self._order(lambda: setattr(self, "_plan", plan))

    def heal(self):
        """Do no more harm; what is still held back goes out now, late."""
        self._order(self._heal)

    def cut(self):
        """Close the router's side; what the engine says meanwhile is lost."""
        self._order(self._cut)

    def restore(self):
        """Open the router's side again, on the same port."""
        self._order(self._restore)

    def __enter__(self):
        self._context = zmq.Context()
        self._wake_read, self._wake_write = socket.socketpair()
        self._upstream = self._context.socket(zmq.SUB)
        self._upstream.setsockopt(zmq.RCVHWM, 0)
        self._upstream.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._upstream.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = self._upstream.get_monitor_socket(_EVENTS)
        self._open()
        self._upstream.connect(self._upstream_endpoint)
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._order(lambda: setattr(self, "_is_running", False))
        self._thread.join(_LIMIT_S)
        self._upstream.disable_monitor()
        self._monitor.close(linger=0)
        self._wake_read.close()
        self._wake_write.close()
        self._context.destroy(linger=0)

    def _order(self, action):
        done = Future()
        self._orders.put((action, done))
        self._wake_write.send(b"\0")
        return done.result(_LIMIT_S)

    def _run(self):
        while self._is_running:
            ready = self._poll()
            if self._wake_read.fileno() in ready:
                self._wake_read.recv(4096)
            while not self._orders.empty():
                self._obey(*self._orders.get())
            if self._monitor in ready:
                self._note_change(recv_monitor_message(self._monitor)["event"])
            if self._downstream in ready:
                self.has_subscriber = self._downstream.recv().startswith(b"\1")
            if self._upstream in ready:
                self._accept(self._upstream.recv_multipart())
            self._send_what_is_due()

    def _poll(self):
        poller = zmq.Poller()
        open_ones = (self._wake_read.fileno(), self._monitor, self._upstream, self._downstream)
        for each in open_ones:
            if each is not None:
                poller.register(each, zmq.POLLIN)
        pause_ms = None
        if self._outbox:
            pause_ms = max(0, int((self._outbox[0][0] - time.monotonic()) * 1000) + 1)
        return dict(poller.poll(pause_ms))

    def _obey(self, action, done):
        try:
            done.set_result(action())
        except BaseException as error:  # noqa: BLE001 - it is raised where the order came from
            done.set_exception(error)

    def _note_change(self, event):
        self.is_upstream_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.is_upstream_connected:
            self.restored_at.append(time.monotonic())
        if self._hides_restarts or self._is_cut:
            return
        if self.is_upstream_connected:
            self._open()
        else:
            self._close()

    def _accept(self, frames):
        self.num_seen += 1
        fault, size = self._plan.next()
        self.counts[fault] += 1
        if fault in (Fault.DUPLICATE, Fault.HOLD):
            self._held.append([size + 1, frames])
        if fault not in (Fault.DROP, Fault.HOLD):
            self._enqueue(frames, size if fault is Fault.DELAY else 0)
        self._release_overtaken()

    def _enqueue(self, frames, delay_s=0.0):
        # Nothing overtakes what is delayed: the stream stands still, as behind a slow link.
        last_due = self._outbox[-1][0] if self._outbox else 0.0
        self._outbox.append((max(last_due, time.monotonic() + delay_s), frames))

    def _release_overtaken(self):
        for entry in self._held:
            entry[0] -= 1
        for _, frames in (entry for entry in self._held if entry[0] <= 0):
            self._enqueue(frames)
        self._held = [entry for entry in self._held if entry[0] > 0]

    def _send_what_is_due(self):
        while self._outbox and self._outbox[0][0] <= time.monotonic():
            _, frames = self._outbox.popleft()
            if self._downstream is None:
                self.counts["cut off"] += 1
            else:
                self._downstream.send_multipart(frames)

    def _heal(self):
        self._plan = NO_FAULTS
        for _, frames in self._held:
            self._enqueue(frames)
        self._held = []

    def _cut(self):
        self._is_cut = True
        self._close()

    def _restore(self):
        self._is_cut = False
        self._open()
        self.restored_at.append(time.monotonic())

    def _close(self):
        if self._downstream is not None:
            self._downstream.close(linger=0)
        self._downstream, self.has_subscriber = None, False

    def _open(self):
        if self._downstream is None:
            self._downstream = self._context.socket(zmq.XPUB)
            self._downstream.setsockopt(zmq.SNDHWM, 0)
            self._port = bind(self._downstream, self._port)
