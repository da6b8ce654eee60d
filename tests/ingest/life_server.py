"""A LifePublisher on real sockets, encrypted or not."""

import threading

import zmq

from kvplug.engines.replay_server import END
from tests.ingest.life_publisher import LifePublisher
from tests.ingest.publisher import frames_of


class LifeServer:
    """An XPUB and a ROUTER; a thread says hello to newcomers and answers asks.

    `asks`: the requests that came. `lock` is held while the publisher is looked at.
    """

    def __init__(self, keys=None, **about):
        self.lock, self.asks, self.num_subscriptions = threading.Lock(), [], 0
        self.context = zmq.Context()
        self.authenticator = None
        if keys is not None:
            self.authenticator = keys.authenticator(self.context)
            self.authenticator.start()
        self._xpub, self._router = self._open(zmq.XPUB, keys), self._open(zmq.ROUTER, keys)
        self._xpub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.endpoint, answers_at = map(_bound, (self._xpub, self._router))
        about = {"answers_at": answers_at.replace("127.0.0.1", "*"), **about}
        self.publisher = LifePublisher(**about)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def send(self, make):
        """Publish what `make(publisher)` returns; None: it is lost."""
        with self.lock:
            message = make(self.publisher)
            if message is not None:
                self._xpub.send_multipart(frames_of(message))

    def close(self):
        self._stopping.set()
        self._thread.join()
        for each in (self._xpub, self._router):
            each.close(linger=0)
        if self.authenticator is not None:
            self.authenticator.stop()
        self.context.destroy(linger=0)

    def _open(self, kind, keys):
        made = self.context.socket(kind)
        if keys is not None:
            keys.protect(made)
        return made

    def _run(self):
        while not self._stopping.is_set():
            with self.lock:
                if self._xpub.poll(0) and self._xpub.recv()[:1] == b"\x01":
                    self.num_subscriptions += 1
                    self._xpub.send_multipart(frames_of(self.publisher.hello()))
            if self._router.poll(5):
                client, _, request = self._router.recv_multipart()
                with self.lock:
                    self.asks.append(request)
                    for each in self.publisher.answer(request):
                        self._router.send_multipart([client, b"", *frames_of(each)])
                    self._router.send_multipart([client, b"", b"", END, b""])


def _bound(opened):
    opened.bind("tcp://127.0.0.1:*")
    return opened.getsockopt_string(zmq.LAST_ENDPOINT)
