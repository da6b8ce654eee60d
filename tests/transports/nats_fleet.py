"""A fleet on a real NATS server, as tests want it: publishers of ours as models, and a reader."""

from contextlib import contextmanager

from nats.js import api

from kvplug.nats.connection import NatsConnection
from kvplug.nats.settings import NatsSettings
from kvplug.nats.subjects import PublisherName, Subjects
from kvplug.transports.nats import NatsTransport
from tests.ingest.life_publisher import LifePublisher
from tests.nats_servers import nats_servers


class NatsFleet:
    """Calls wait until the server has what they say, but for `post`."""

    def __init__(self, node):
        self.node = node
        self.settings = NatsSettings(servers=(node.url,))
        self.subjects = Subjects(self.settings.fleet)
        self.connections = []
        self.client = self.connect("engines")

    def connect(self, name):
        connection = NatsConnection(self.settings, name)
        self.connections.append(connection)
        connection.start()
        return connection

    def transport(self, router_id="1"):
        return NatsTransport(
            self.connect(f"router-{router_id}"), self.subjects, router_id=router_id
        )

    def run(self, call):
        """An async function of the client and its JetStream."""

        async def called():
            client = await self.client.connected()
            return await call(client, client.jetstream(timeout=5))

        return self.client.submit(called()).result(20)

    def make_stream(self, **more):
        config = api.StreamConfig(
            name=self.subjects.stream,
            subjects=[self.subjects.all_events, self.subjects.marks],
            **more,
        )
        self.run(lambda client, js: js.add_stream(config))

    def delete_stream(self):
        self.run(lambda client, js: js.delete_stream(self.subjects.stream))

    def publish(self, subject, *payloads, headers=None):
        """Into the stream; the sequence of the last one."""

        async def published(client, js):
            for payload in payloads:
                ack = await js.publish(subject, payload, headers=headers)
            return ack.seq

        return self.run(published)

    def post(self, subject, payload, headers=None):
        """To whoever listens."""

        async def posted(client, js):
            await client.publish(subject, payload, headers=headers)
            await client.flush()

        self.run(posted)

    def stop(self):
        for connection in self.connections:
            connection.stop()


class NatsEngine:
    """`model` is what the engine holds and has said; asks are answered, and counted in `asks`."""

    def __init__(self, fleet, worker="w", **about):
        self.name, self._fleet = PublisherName(worker, 0), fleet
        self.model = LifePublisher(answers_at=None, **about)
        self.seq, self.asks = 0, []
        fleet.run(self._answer_asks)

    @property
    def subject(self):
        return self._fleet.subjects.events(self.name)

    def say(self, *messages):
        """Into the stream."""
        self.seq = self._fleet.publish(self.subject, *(each.payload for each in messages))

    def beat(self):
        headers = {"Kvplug-Seq": str(self.seq)}
        self._fleet.post(
            self._fleet.subjects.beats(self.name), self.model.hello().payload, headers=headers
        )

    async def _answer_asks(self, client, js):
        async def answer(msg):
            self.asks.append(msg.data)
            for each in self.model.answer(msg.data):
                await client.publish(msg.reply, each.payload)

        await client.subscribe(self._fleet.subjects.asks(self.name), cb=answer)
        await client.flush()


@contextmanager
def nats_fleet(more=""):
    with nats_servers(more=more) as [node]:
        fleet = NatsFleet(node)
        try:
            yield fleet
        finally:
            fleet.stop()
