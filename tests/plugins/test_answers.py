"""The socket that takes asks: fast for who reads, and what fails is one answer only."""

import logging
import time
from contextlib import contextmanager

import pytest
import zmq

from kvplug import protocol
from kvplug.engines import answer_maker, answers
from kvplug.engines.answers import AnswerServer
from kvplug.engines.life import Life
from kvplug.events import AllBlocksCleared, EventBatch
from kvplug.protocol import Ask, WorkerHello
from tests.plugins.stock_client import wait_until
from tests.plugins.stream_client import StreamClient

logger = logging.getLogger("tests.plugins")


@contextmanager
def answering(life):
    with zmq.Context() as context:
        server = AnswerServer(
            context.socket(zmq.ROUTER), "tcp://127.0.0.1:0", life, b"", logger
        )  # fmt: skip
        server.binding.bind()
        server.start()
        try:
            yield server
        finally:
            server.stop(5.0)


@pytest.fixture
def client():
    client = StreamClient()
    yield client
    client.close()


def test_a_long_history_goes_out_fast(client):
    life, num_messages = Life(WorkerHello()), 2000
    for _ in range(num_messages):
        life.apply([EventBatch(events=(AllBlocksCleared(),))])
    with answering(life) as server:
        started = time.monotonic()
        got = client.ask(server.endpoint, life.position[0], 0)
        assert len(got) >= num_messages
        assert time.monotonic() - started < 3.0  # with 4 unsent and a pause of 10 ms: 5 s


def test_an_answer_that_fails_takes_no_other_with_it(client, monkeypatch, caplog):
    life = Life(WorkerHello())
    for _ in range(500):
        life.apply([EventBatch(events=(AllBlocksCleared(),))])
    known, _ = life.position

    def fail(_):
        raise TypeError("odd")

    monkeypatch.setattr(answer_maker, "parts_of", fail)
    with answering(life) as server:
        dealers = [client.context.socket(zmq.DEALER) for _ in range(2)]
        for dealer in dealers:
            dealer.connect(server.endpoint)
        # Once it is on its way, and not all of it is read.
        dealers[0].setsockopt(zmq.RCVHWM, 1)
        dealers[0].send_multipart([b"", protocol.encode(Ask(known, 0))])
        assert dealers[0].poll(5000)
        for i in range(2):
            dealers[1].send_multipart([b"", protocol.encode(Ask(0, 0))])
            wait_until(lambda i=i: server.failures == {"TypeError": i + 1}, "it fails")
        while dealers[0].recv_multipart()[-2] != answers.END:
            pass
        assert server.num_answers == 1
        for dealer in dealers:
            dealer.close(0)
    [record] = caplog.records
    assert "an answer failed: TypeError: odd" in record.getMessage()
