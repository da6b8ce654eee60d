"""Asks of readers to an engine that is away: threads for answers are few, and none may wait."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvplug.errors import TransportError
from kvplug.forwarder.own_wire import OwnWire
from kvplug.ingest.replay import ReplaySettings
from kvplug.protocol import Ask
from tests.forwarder.engines import WORKER, engine, forwarding
from tests.nats_servers import nats_servers
from tests.plugins.nats_reader import make_stream
from tests.waiting import until

SHORT = ReplaySettings(max_answer_s=0.1)


def wire():
    return OwnWire(WORKER, lambda _: None, lambda: None, settings=SHORT)


def test_an_engine_that_is_away_is_not_waited_for():
    with pytest.raises(TransportError, match="is gone"):
        wire().answer(Ask(0, 0))


async def test_an_ask_ends_with_the_stream_and_with_the_forwarder():
    with ThreadPoolExecutor(1) as pool:
        one = wire()
        one.connected(can_replay=True)
        asked = pool.submit(one.answer, Ask(0, 0))
        await until(lambda: one.request, "it is asked")
        one.disconnected()
        assert isinstance(asked.exception(1), TransportError)
        with nats_servers() as [node]:
            await make_stream(node.url)
            with engine(is_ours=True) as ours:
                ours.store(100)
                with forwarding(node.url, ours) as forwarder:
                    [engine_] = forwarder.engines
                    await until(lambda: engine_.wire, "it is heard")
                    engine_.replayed = engine_.replay_ended = lambda *_: None  # it hangs
                    asked = pool.submit(engine_.wire.answer, Ask(0, 0))
                    await until(lambda: engine_.wire.request, "it is asked")
                assert isinstance(asked.exception(1), TransportError)
