"""One request and the answers of the engines that work on it, as one stream.

In:  a request that is booked on a rank, a client.   Out: dicts of tokens, none twice, none lost.

When an engine is lost, the request migrates: the next engine gets the prompt and the tokens so far,
and is asked for the rest. The router hears of the first token of each engine, that the request is
still served, and of its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from msgspec import structs

from kvplug.errors import NoWorkerError, UnknownRequestError, WorkerLostError
from kvplug.events import Rank
from kvplug.push_router.client import Output, WorkerClient
from kvplug.push_router.request import GenerateRequest
from kvplug.router.core import Router
from kvplug.router.migration import Migration
from kvplug.router.options import RouteOptions

logger = logging.getLogger(__name__)

OnWorkerLost = Callable[[Rank, WorkerLostError, Migration | None], None]
"""Called when an engine is lost: its rank, why, and where the request goes on. None: nowhere, or
the router had forgotten the request (its worker was removed) and it was routed anew.
"""

_LENGTH: Final = "length"


@dataclass(slots=True, kw_only=True)
class Engines:
    """What all requests have in common; migration_limit: migrations of one request at most."""

    router: Router
    client: WorkerClient
    migration_limit: int
    on_worker_lost: OnWorkerLost


@dataclass(slots=True, kw_only=True)
class Exchange:
    """outputs, end. The request is booked as `request_id` on `rank`.

    asked: with the prompt of the caller; options: for routing it again, without pins.
    """

    engines: Engines
    request_id: str
    rank: Rank
    asked: GenerateRequest
    options: RouteOptions
    _generated: list[int] = field(default_factory=list)
    _num_before: int = 0  # tokens when it came to this rank
    _failed: set[str] = field(default_factory=set)
    _num_migrations: int = 0
    _renewal: asyncio.TimerHandle | None = None
    _is_whole: bool = False
    _is_over: bool = False

    async def outputs(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer; WorkerLostError if it cannot go on anywhere."""
        try:
            self._renew_in_time()
            while not self._is_whole:
                lost: WorkerLostError | None = None
                try:
                    # Closed with this generator, which closes the engine's stream.
                    async with aclosing(self._ask()) as outputs:
                        async for output in outputs:
                            yield self._received(output)
                except WorkerLostError as error:
                    lost = error
                if lost is not None and self._num_left == 0:  # only its end is missing
                    yield self._received(Output((), _LENGTH))
                elif lost is not None:
                    self._migrate(lost)
        finally:
            self.end()

    def end(self) -> None:
        """The request is over, for whatever reason; once."""
        if self._is_over:
            return
        self._is_over = True
        if self._renewal is not None:
            self._renewal.cancel()
        num_here = len(self._generated) - self._num_before
        if not self._router.finish(self.request_id, num_here if self._is_whole else None):
            logger.debug("request %s had expired, or its worker was removed", self.request_id)

    @property
    def _router(self) -> Router:
        return self.engines.router

    @property
    def _num_left(self) -> int | None:
        """Tokens that may still come; None without a limit."""
        max_tokens = self.asked.stop_conditions.max_tokens
        return None if max_tokens is None else max(0, max_tokens - len(self._generated))

    async def _ask(self) -> AsyncGenerator[Output, None]:
        """Outputs of the engine that the request is on, up to one with a finish reason."""
        request = structs.replace(
            self.asked,
            token_ids=[*self.asked.token_ids, *self._generated],
            stop_conditions=self.asked.stop_conditions.after(len(self._generated)),
            dp_rank=self.rank.dp_rank if self._has_ranks else None,
        )
        async with aclosing(self.engines.client.generate(self.rank, request)) as outputs:
            async for output in outputs:
                yield output
                if output.finish_reason is not None:
                    return
        raise WorkerLostError(f"{self.rank} ended its answer without a finish reason")

    @property
    def _has_ranks(self) -> bool:
        return sum(rank.worker == self.rank.worker for rank in self._router.ranks) > 1

    def _received(self, output: Output) -> dict[str, Any]:
        token_ids = list(output.token_ids)
        if token_ids and len(self._generated) == self._num_before:
            self._router.first_token(self.request_id)
        self._generated += token_ids
        if output.finish_reason is None:
            return {"token_ids": token_ids}
        self._is_whole = True
        return {"token_ids": token_ids, "finish_reason": output.finish_reason}

    def _migrate(self, lost: WorkerLostError) -> None:
        failed, migration = self.rank, None
        self._failed.add(failed.worker)
        logger.warning("request %s lost %s: %s", self.request_id, failed, lost)
        try:
            self._require_migration_left()
            migration = self._rebook()
        except NoWorkerError as error:
            self.engines.on_worker_lost(failed, lost, None)
            raise WorkerLostError(
                f"cannot go on with request {self.request_id!r} after "
                f"{len(self._generated)} tokens: {lost}; {error}"
            ) from lost
        self._num_migrations += 1
        self._num_before = len(self._generated)
        self.engines.on_worker_lost(failed, lost, migration)

    def _require_migration_left(self) -> None:
        limit = self.engines.migration_limit
        if self._num_migrations >= limit:
            raise NoWorkerError(f"it has migrated as often as it may, {limit} times")

    def _rebook(self) -> Migration | None:
        token_ids = [*self.asked.token_ids, *self._generated]
        options: RouteOptions = {**self.options, "max_tokens": self._num_left}
        namespace = self.asked.namespace
        try:
            migration = self._router.migrate(
                self.request_id, token_ids, namespace=namespace, exclude=self._failed, **options
            )
        except UnknownRequestError:  # its worker was removed meanwhile, and its load with it
            allowed = options.get("workers")
            if allowed is None:
                allowed = {rank.worker for rank in self._router.ranks}
            options["workers"] = frozenset(allowed) - self._failed
            decision = self._router.route(
                token_ids, request_id=self.request_id, namespace=namespace, **options
            )
            self.rank = decision.rank
            return None
        self.rank = migration.decision.rank
        return migration

    def _renew_in_time(self) -> None:
        """Its load counts until it ends, not until it expires."""
        period_s = self._router.config.request_expiry_s / 2
        self._renewal = asyncio.get_running_loop().call_later(period_s, self._renew)

    def _renew(self) -> None:
        self._router.renew(self.request_id)
        self._renew_in_time()


class TokenStream:
    """An async iterator over the outputs of a request: dicts with `token_ids`, the last one with
    `finish_reason`.

    The request counts as load until the stream ends or is closed, by `aclose` or as an async
    context manager. One that is dropped is closed by asyncio; if nothing was read of it, its load
    counts until `request_expiry_s` is over.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._outputs = exchange, exchange.outputs()

    @property
    def request_id(self) -> str:
        """The router's name for the request."""
        return self._exchange.request_id

    @property
    def rank(self) -> Rank:
        """Where the request is now."""
        return self._exchange.rank

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        """WorkerLostError, RequestRefusedError: the answer goes no further than what came."""
        return await anext(self._outputs)

    async def aclose(self) -> None:
        """No more is wanted: close the engine's stream, and free the booking."""
        try:
            await self._outputs.aclose()
        finally:
            self._exchange.end()  # if nothing was read, the generator has not begun

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
