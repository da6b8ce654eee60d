"""/workers: engines that come and go while the router runs.

In:  the form that `--worker` has, a name.   Out: the fleet as it is then.

What is changed here counts until the router ends; its settings are not written.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from kvplug.api_errors import ApiError
from kvplug.errors import ConfigError, TransportError
from kvplug.server.api.reading import BodyReader
from kvplug.server.config import WorkerSpec
from kvplug.server.control.guard import Guard
from kvplug.server.control.messages import (
    AddWorker,
    ChangeWorker,
    WorkerList,
    WorkerState,
    read_message,
)
from kvplug.server.workers.fleet import Fleet
from kvplug.server.workers.worker import Worker


class WorkerRoutes:
    """`routes` for an application."""

    def __init__(self, guard: Guard, reader: BodyReader, fleet: Fleet) -> None:
        self._guard, self._reader, self._fleet = guard, reader, fleet
        one = "/workers/{name:.+}"
        self.routes = [
            web.get("/workers", self.list),
            web.post("/workers", self.add),
            web.get(one, self.show),
            web.patch(one, self.change),
            web.delete(one, self.remove),
        ]

    async def list(self, request: web.Request) -> web.Response:
        """All workers, up or not."""
        self._guard.require(request)
        states = [self._state(worker) for worker in self._fleet.workers.values()]
        return _answer(WorkerList(workers=states))

    async def show(self, request: web.Request) -> web.Response:
        """One of them."""
        self._guard.require(request)
        return _answer(self._state(self._worker(request)))

    async def add(self, request: web.Request) -> web.Response:
        """Route to another engine from now on: 201, or 200 if it is there already."""
        self._guard.require(request)
        asked = await read_message(await self._reader.read(request), AddWorker)
        try:
            spec = WorkerSpec.parse(asked.worker)
        except ConfigError as error:
            raise _refused(error) from error
        if spec.name not in self._fleet.workers:
            try:
                worker = await self._fleet.add(spec, frozenset(asked.taints))
            except (ConfigError, TransportError) as error:
                if spec.name not in self._fleet.workers:
                    raise _refused(error) from error
                # Another request added it while this one waited.
            else:
                return _answer(self._state(worker), 201)
        before = self._fleet.workers[spec.name]
        if before.spec != spec:
            message = f"worker {spec.name!r} is there already as {before.spec.text!r}: remove it "
            raise ApiError(409, message + "before it is added anew", code="worker_exists")
        return _answer(self._state(before))

    async def change(self, request: web.Request) -> web.Response:
        """Drain a worker or let it work again, and replace its taints."""
        self._guard.require(request)
        worker = self._worker(request)
        asked = await read_message(await self._reader.read(request), ChangeWorker)
        if asked.taints is not None:
            await self._fleet.set_taints(worker, frozenset(asked.taints))
        if asked.drain is not None:
            self._fleet.set_draining(worker, asked.drain)
        return _answer(self._state(worker))

    async def remove(self, request: web.Request) -> web.Response:
        """Forget an engine; what it is answering goes on."""
        self._guard.require(request)
        await self._fleet.remove(self._worker(request))
        return web.Response(status=204)

    def _worker(self, request: web.Request) -> Worker:
        name = request.match_info["name"]
        if (worker := self._fleet.workers.get(name)) is None:
            message = f"there is no worker {name!r}; names are as --worker has them, %-encoded"
            raise ApiError(404, message, code="worker_not_found")
        return worker

    def _state(self, worker: Worker) -> WorkerState:
        return WorkerState(
            name=worker.name,
            url=worker.url,
            state=worker.state,
            reason=worker.down_because,
            models=sorted(worker.models),
            dp_size=len(worker.sources),
            taints=sorted(worker.taints),
            requests_in_flight=self._fleet.num_in_flight(worker),
        )


def _refused(error: Exception) -> ApiError:
    return ApiError(400, str(error), code="invalid_field", param="worker")


def _answer(message: msgspec.Struct, status: int = 200) -> web.Response:
    body = msgspec.json.encode(message)
    return web.Response(body=body, status=status, content_type="application/json")
