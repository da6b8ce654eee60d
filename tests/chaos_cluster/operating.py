"""What somebody does to the streams and buckets of a fleet by hand, or a broken disk.

In:  a URL of a server, the fleet.   Out: the deed is done when the call returns.
"""

import asyncio
from contextlib import suppress

import nats
from nats.js.errors import NotFoundError

from kvplug.nats.client import connect
from kvplug.nats.subjects import Subjects

FLEET = "chaos"
_NUM_TRIES, _RETRY_S = 40, 0.25
_CHUNK, _MANIFEST = "C", "manifest"


class Operator:
    """purge, delete_stream, delete_consumers, keep_for; damage_snapshot, delete_manifest."""

    def __init__(self, urls):
        self._urls, self._subjects = urls, Subjects(FLEET)
        self.objects = f"OBJ_{self._subjects.snapshot_bucket}"

    def purge(self):
        self._do(lambda js: js.purge_stream(self._subjects.stream))

    def delete_stream(self):
        self._do(lambda js: js.delete_stream(self._subjects.stream))

    def consumers(self):
        infos = self._do(lambda js: js.consumers_info(self._subjects.stream))
        return {info.name: info for info in infos}

    def delete_consumers(self):
        for name in self.consumers():
            self._do(lambda js, name=name: js.delete_consumer(self._subjects.stream, name))

    def stream(self):
        """(first sequence, last sequence, number of messages)."""
        state = self._do(lambda js: js.stream_info(self._subjects.stream)).state
        return state.first_seq, state.last_seq, state.messages

    def leader(self):
        """The name of the node that leads the stream."""
        return self._do(lambda js: js.stream_info(self._subjects.stream)).cluster.leader

    def keep_for(self, seconds):
        """The stream's retention from now on."""

        async def update(js):
            config = (await js.stream_info(self._subjects.stream)).config
            window = min(seconds, config.duplicate_window or seconds)
            await js.update_stream(config.evolve(max_age=seconds, duplicate_window=window))

        self._do(update)

    def manifest(self):
        """Its bytes; None without one."""

        async def get(js):
            bucket = await js.key_value(self._subjects.state_bucket)
            with suppress(NotFoundError):
                return (await bucket.get(_MANIFEST)).value

        return self._do(get)

    def delete_manifest(self):
        async def delete(js):
            await (await js.key_value(self._subjects.state_bucket)).purge(_MANIFEST)

        self._do(delete)

    def delete_chunk(self):
        """One chunk of each snapshot is gone."""

        async def delete(js):
            for sequence, _, _ in await self._chunks(js):
                await js.delete_msg(self.objects, sequence)

        self._do(delete)

    def change_bytes(self):
        """A chunk of each snapshot has other bytes, of the same number."""

        async def change(js):
            for sequence, subject, data in await self._chunks(js):
                await js.delete_msg(self.objects, sequence)
                middle = len(data) // 2
                changed = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
                await js.publish(subject, changed)

        self._do(change)

    async def _chunks(self, js):
        """(sequence, subject, bytes) of the last chunk of each object."""
        state = (await js.stream_info(self.objects, subjects_filter=">")).state
        subjects = [each for each in state.subjects or () if each.split(".")[2] == _CHUNK]
        found = [await js.get_last_msg(self.objects, subject) for subject in subjects]
        return [(each.seq, each.subject, each.data or b"") for each in found]

    def _do(self, deed):
        return asyncio.run(self._tried(deed))

    async def _tried(self, deed):
        """A leader may have to be elected first."""
        num_left = _NUM_TRIES
        while True:
            try:
                client = await connect(self._urls, connect_timeout=2, error_cb=_pass_over)
                async with client:
                    return await deed(client.jetstream(timeout=2))
            except (TimeoutError, nats.errors.Error, OSError) as error:
                if not num_left or isinstance(error, NotFoundError):
                    raise
                num_left -= 1
                await asyncio.sleep(_RETRY_S)


async def _pass_over(_error):
    """It is raised where it was asked for."""
