"""A server comes back with an older stream: numbers are given again, nothing is purged unread."""

import shutil

from tests.cluster.snapshots import a_fleet, frozen
from tests.nats_servers import nats_servers
from tests.waiting import until


async def test_an_older_stream_begins_a_generation_with_the_same_snapshot(tmp_path):
    with nats_servers() as (node,):
        async with a_fleet(node.url, "t") as fleet:
            early = await fleet.publish(3)
            stream = node.store / "jetstream" / "$G" / "streams" / fleet.subjects.stream
            await restarted(node, fleet, lambda: shutil.copytree(stream, tmp_path / "old"))
            made, heard = fleet.checkpoints(), []
            late = await fleet.publish(5)
            await fleet.run(made.make(frozen(late, b"data")))

            def lose_the_end():
                shutil.rmtree(stream)
                shutil.copytree(tmp_path / "old", stream)

            await restarted(node, fleet, lose_the_end)
            assert (await fleet.stream()).last_seq == early

            async def on_manifest(manifest, needs_clear):
                heard.append((manifest.generation, needs_clear))

            watching = fleet.connection.submit(made.watch(on_manifest))
            await until(lambda: heard, "a living replica hears of it")
            assert heard == [(1, False)]
            restored = await fleet.run(fleet.checkpoints("b").restore())
            assert (restored.seq, restored.snapshot) == (0, b"data")
            again = await fleet.publish(1)
            assert again == early + 1 < late
            await fleet.run(made.make(frozen(again - 1, b"more")))
            assert (await fleet.stream()).messages == 1  # what no snapshot has
            watching.cancel()


async def restarted(node, fleet, between):
    node.stop()
    between()
    node.start()
    await until(lambda: fleet.connection.is_connected, "it is connected")
