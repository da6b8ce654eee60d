"""KvPushRouter: a Router that also sends the requests.

In:  token ids and how to go on from them.   Out: a stream of tokens, though workers may fail.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypedDict, Unpack, cast

from kvplug.errors import ConfigError, WorkerLostError
from kvplug.events import Namespace, Rank
from kvplug.hashing import TokensLike, as_tokens
from kvplug.push_router.client import WorkerClient
from kvplug.push_router.exchange import Engines, Exchange, OnWorkerLost, TokenStream
from kvplug.push_router.request import GenerateRequest, SamplingOptions, StopConditions, checked
from kvplug.router.core import Router
from kvplug.router.migration import Migration
from kvplug.router.options import RouteOptions, RouterConfigOverride
from kvplug.setting import shown, whole


class Constraints(TypedDict, total=False):
    """As of `Router.route`: who may take the request, at first and after each failure."""

    workers: Collection[str] | None
    required_taints: Collection[str]
    preferred_taints: Mapping[str, float]
    session: str


class KvPushRouter:
    """generate; best_worker_id and get_potential_loads, which send nothing.

    `router` knows the workers and hears their events; `client` asks their engines. All calls belong
    to one event loop.
    """

    def __init__(
        self,
        router: Router,
        client: WorkerClient,
        *,
        migration_limit: int = 3,
        on_worker_lost: OnWorkerLost | None = None,
    ) -> None:
        """`migration_limit`: how often one request may go on elsewhere.

        `on_worker_lost` is called for each engine that a request loses. The worker stays in the
        fleet: it is left out for this request only, and whoever checks its health decides.
        ConfigError for a limit below 0.
        """
        if not whole(migration_limit) >= 0:
            expected = "a whole number of at least 0"
            raise ConfigError(f"migration_limit must be {expected}, got {shown(migration_limit)}")
        self.router = router
        self._engines = Engines(
            router=router,
            client=client,
            migration_limit=migration_limit,
            on_worker_lost=on_worker_lost or _unheard,
        )

    async def generate(  # noqa: PLR0913 - by name, as in Dynamo
        self,
        token_ids: TokensLike,
        *,
        model: str = "",
        stop_conditions: Mapping[str, object] | None = None,
        sampling_options: Mapping[str, object] | None = None,
        router_config_override: Mapping[str, object] | None = None,
        worker_id: str | None = None,
        dp_rank: int | None = None,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        **constraints: Unpack[Constraints],
    ) -> TokenStream:
        """Book the request, and send it as the stream is read.

        `worker_id` and `dp_rank` choose where it begins; if that worker fails, it goes on wherever
        `constraints` allow it. The fields of the dicts are those of StopConditions, SamplingOptions
        and RouterConfigOverride. Errors as of `Router.route`, and ConfigError for other fields.
        """
        _require_known(constraints, "generate")
        tokens = as_tokens(token_ids)
        asked = GenerateRequest(
            token_ids=tokens.tolist(),
            model=model,
            namespace=namespace,
            stop_conditions=checked(stop_conditions, StopConditions, "stop_conditions"),
            sampling_options=checked(sampling_options, SamplingOptions, "sampling_options"),
        )
        override = _override_of(router_config_override)
        options = cast(RouteOptions, {"model": model, "override": override, **constraints})
        first: RouteOptions = {**options, "max_tokens": asked.stop_conditions.max_tokens}
        first["worker"], first["dp_rank"] = worker_id or "", dp_rank
        decision = self.router.route(tokens, namespace=namespace, **first)
        return TokenStream(
            Exchange(
                engines=self._engines,
                request_id=decision.request_id,
                rank=decision.rank,
                asked=asked,
                options=options,
            )
        )

    async def best_worker_id(
        self,
        token_ids: TokensLike,
        *,
        model: str = "",
        router_config_override: Mapping[str, object] | None = None,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        **constraints: Unpack[Constraints],
    ) -> tuple[str, int]:
        """The worker that would get the request now, and leading blocks of the prompt that it has.

        Nothing is booked. Errors as of `Router.route`.
        """
        _require_known(constraints, "best_worker_id")
        override = _override_of(router_config_override)
        return self.router.best_worker_id(
            token_ids, namespace=namespace, model=model, override=override, **constraints
        )

    async def get_potential_loads(
        self,
        token_ids: TokensLike,
        *,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
    ) -> list[dict[str, Any]]:
        """Of each rank, its load if it got the request; nothing is booked.

        By `worker_id` and `dp_rank`: `potential_prefill_tokens` to be computed there, and
        `potential_decode_blocks` of requests in flight.
        """
        return [
            {
                "worker_id": each.rank.worker,
                "dp_rank": each.rank.dp_rank,
                "potential_prefill_tokens": each.potential_prefill_tokens,
                "potential_decode_blocks": each.potential_decode_blocks,
            }
            for each in self.router.get_potential_loads(token_ids, namespace=namespace)
        ]


def _require_known(constraints: Constraints, call: str) -> None:
    unknown = sorted(constraints.keys() - Constraints.__annotations__.keys())
    if unknown:
        raise TypeError(f"{call}() got an unexpected keyword argument {unknown[0]!r}")


def _override_of(given: Mapping[str, object] | None) -> RouterConfigOverride | None:
    """A dict of the fields, `moe_query` as a MoeQuery or a dict of its fields."""
    if given is None:
        return None
    return checked(given, RouterConfigOverride, "router_config_override")


def _unheard(rank: Rank, lost: WorkerLostError, migration: Migration | None) -> None:
    pass
