"""/select and /reservations: decisions for gateways that forward themselves.

In:  a prompt in any form, and what the request demands.
Out: a worker, what it holds of the prompt, what others would cost; a reservation, if one is asked
for, which counts as load until the gateway says that it is over.

A reservation is a request in flight as any other: /reservations shows the proxy's own, too.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
from aiohttp import web
from msgspec import UNSET

from kvplug.api_errors import ApiError
from kvplug.audit.audit import Audit, Usage
from kvplug.errors import ConfigError, HashingError, NoWorkerError, UnknownRankError
from kvplug.events import Namespace, Rank
from kvplug.hashing import Tokens
from kvplug.http_service import RANK_HEADER
from kvplug.router.decider import Decision
from kvplug.router.options import RouteOptions, RouterConfigOverride
from kvplug.router.prompt import NO_TOKENS
from kvplug.server.api.asked import Asked
from kvplug.server.api.endpoints import ENDPOINTS
from kvplug.server.api.reading import BodyReader
from kvplug.server.control.guard import Guard
from kvplug.server.control.messages import (
    Failed,
    Finish,
    Moved,
    RankedRank,
    RankView,
    Reservation,
    Select,
    Selection,
    read_message,
)
from kvplug.server.proxy.connection import LostError
from kvplug.server.proxy.deciding import reason_of
from kvplug.server.proxy.forwarding import Proxy
from kvplug.server.workers.fleet import Fleet

_ENDPOINTS: Final = {each.path: each for each in ENDPOINTS if each.kind is not None}
_OK: Final = 200
_PROMPTS: Final = ("token_ids", "text", "messages", "body", "sequence_hashes")


class _Prompt(NamedTuple):
    """tokens: None if they are not known; hashes: of their full blocks, if that is what is known;
    num_tokens: of the prompt, 0 if that is not known; unknown_because: as of a Forward.
    """

    model: str
    tokens: Tokens | None
    namespace: Namespace
    max_tokens: int | None
    hashes: list[int] | None = None
    num_tokens: int = 0
    unknown_because: str | None = None


class SelectionRoutes:
    """`routes` for an application."""

    def __init__(
        self,
        guard: Guard,
        reader: BodyReader,
        asked: Asked,
        audit: Audit,
        fleet: Fleet,
        proxy: Proxy,
    ) -> None:
        """`proxy`: reservations count among its requests, and their failures among its own."""
        self._guard, self._reader, self._asked = guard, reader, asked
        self._router, self._audit, self._fleet = audit.router, audit, fleet
        self._proxy = proxy
        one = "/reservations/{id}"
        self.routes = [
            web.post("/select", self.select),
            web.get(one, self.reservation),
            web.post(f"{one}/first_token", self.first_token),
            web.post(f"{one}/renew", self.renew),
            web.post(f"{one}/moved", self.moved),
            web.post(f"{one}/finish", self.finish),
            web.post(f"{one}/failed", self.failed),
            web.delete(one, self.delete),
        ]

    async def select(self, request: web.Request) -> web.Response:
        """The best worker for a prompt, and a reservation there if that is asked for."""
        self._guard.require(request)
        select = await read_message(await self._reader.read(request), Select)
        prompt = await self._prompt_of(select)
        options = self._options_of(select, prompt)
        try:
            return _answer(self._selection(select, prompt, options))
        except NoWorkerError as error:
            code = "busy" if error.constraint == "busy" else "no_worker"
            raise ApiError(503, str(error), code=code, param=error.constraint) from error
        except (ConfigError, HashingError) as error:
            is_taken = select.reserve and "in flight already" in str(error)
            code = "request_id_in_flight" if is_taken else "invalid_field"
            raise ApiError(409 if is_taken else 400, str(error), code=code) from error

    async def reservation(self, request: web.Request) -> web.Response:
        """A request in flight."""
        self._guard.require(request)
        return _answer(self._reservation(_id_of(request)))

    async def first_token(self, request: web.Request) -> web.Response:
        """Its prefill is done."""
        self._guard.require(request)
        return self._done(request, self._router.first_token(_id_of(request)))

    async def renew(self, request: web.Request) -> web.Response:
        """It is still served, and expires as late as if it had been made now."""
        self._guard.require(request)
        return self._done(request, self._router.renew(_id_of(request)))

    async def moved(self, request: web.Request) -> web.Response:
        """It went to another rank than the selected one."""
        self._guard.require(request)
        moved = await read_message(await self._reader.read(request), Moved)
        try:
            return self._done(
                request, self._router.moved(_id_of(request), Rank(moved.worker, moved.dp_rank))
            )
        except UnknownRankError as error:
            raise ApiError(404, str(error), code="worker_not_found", param="worker") from error

    async def finish(self, request: web.Request) -> web.Response:
        """It is over, for whatever reason; what is said of an answer says that there was one."""
        self._guard.require(request)
        finish = await read_message(await self._reader.read(request), Finish)
        request_id = _id_of(request)
        worker = self._reservation(request_id).worker
        if finish != Finish():
            self._proxy.note_answer(worker, _OK)
        if finish.prompt_tokens is not None:
            usage = Usage(finish.prompt_tokens, finish.cached_tokens, finish.completion_tokens)
            self._audit.answered(request_id, usage)
        return self._finished(request_id, finish.completion_tokens)

    async def failed(self, request: web.Request) -> web.Response:
        """It is over, as its worker failed; one that does so again and again is left out."""
        self._guard.require(request)
        failed = await read_message(await self._reader.read(request), Failed)
        request_id = _id_of(request)
        worker = self._reservation(request_id).worker
        if failed.status is None:
            self._proxy.note_loss(worker, LostError("a gateway says so", was_reached=True))
        else:
            self._proxy.note_answer(worker, failed.status)
        return self._finished(request_id, None)

    async def delete(self, request: web.Request) -> web.Response:
        """As finish, with nothing known of the answer."""
        self._guard.require(request)
        self._require_known(_id_of(request))
        return self._finished(_id_of(request), None)

    def _finished(self, request_id: str, num_tokens: int | None) -> web.Response:
        self._audit.abandon(request_id, "no_whole_answer")
        self._router.finish(request_id, num_tokens)
        return web.Response(status=204)

    async def _prompt_of(self, select: Select) -> _Prompt:
        given = [name for name in _PROMPTS if getattr(select, name) not in (None, UNSET)]
        if len(given) != 1:
            seen = ", ".join(given) or "none"
            message = f"expected one of {', '.join(_PROMPTS)}; got {seen}"
            raise ApiError(400, message, code="invalid_field")
        if select.sequence_hashes is not None:
            return self._hashed(select, select.sequence_hashes)
        raw, path = _body_of(select, given[0])
        if (endpoint := _ENDPOINTS.get(path)) is None:
            message = f"path: expected one of {', '.join(_ENDPOINTS)}; got {path!r}"
            raise ApiError(400, message, code="invalid_field", param="path")
        forward = await self._asked.forward_of(raw, endpoint, {})
        if forward.tokens is None and given == ["token_ids"]:
            message = "token_ids: expected a list of whole numbers in [0, 2**32)"
            raise ApiError(400, message, code="invalid_field", param="token_ids")
        return _Prompt(
            forward.model,
            forward.tokens,
            forward.namespace,
            forward.max_tokens,
            num_tokens=0 if forward.tokens is None else len(forward.tokens),
            unknown_because=forward.unknown_because,
        )

    def _hashed(self, select: Select, hashes: list[int]) -> _Prompt:
        model, served = self._asked.model_of({"model": select.model} if select.model else {})
        if select.num_tokens is None:
            message = "num_tokens: expected how many tokens the prompt has, with sequence_hashes"
            raise ApiError(400, message, code="invalid_field", param="num_tokens")
        namespace = Namespace(lora_name=served.lora_name)  # which is in the hashes already
        return _Prompt(model, None, namespace, select.max_tokens, hashes, select.num_tokens)

    def _options_of(self, select: Select, prompt: _Prompt) -> RouteOptions:
        workers = self._fleet.candidates(prompt.model)
        if select.workers is not None:
            workers &= frozenset(select.workers)
        override = None
        if (select.overlap_score_weight, select.router_temperature) != (None, None):
            override = RouterConfigOverride(
                overlap_score_weight=select.overlap_score_weight,
                router_temperature=select.router_temperature,
            )
        max_tokens = prompt.max_tokens if select.max_tokens is None else select.max_tokens
        return RouteOptions(
            workers=workers,
            worker=select.worker,
            dp_rank=select.dp_rank,
            required_taints=select.required_taints,
            preferred_taints=select.preferred_taints,
            session=select.session,
            override=override,
            max_tokens=max_tokens,
            reports_first_token=select.reports_first_token,
            num_ranked=select.num_ranked,
        )

    def _selection(self, select: Select, prompt: _Prompt, options: RouteOptions) -> Selection:
        views = self._views(prompt, options) if select.explain else None
        decision = self._decide(select, prompt, options)
        rank, router = decision.rank, self._router
        if select.reserve:
            self._note(decision, prompt)
        expiry_s = router.config.request_expiry_s
        return Selection(
            request_id=decision.request_id,
            model=prompt.model,
            worker=rank.worker,
            url=self._fleet.url_of(rank.worker),
            dp_rank=rank.dp_rank,
            headers=self._headers_to(rank),
            reason=reason_of(
                decision,
                router.config,
                worker=select.worker,
                session=select.session,
                unknown_because=prompt.unknown_because,
                weighs_prefix=select.overlap_score_weight != 0,
            ),
            is_prefix_known=prompt.tokens is not None or prompt.hashes is not None,
            prompt_tokens=prompt.num_tokens,
            prompt_blocks=decision.prompt_blocks,
            overlap_blocks=decision.overlap_blocks,
            cached_tokens=decision.cached_tokens,
            block_size=decision.block_size,
            cost=decision.cost,
            cost_unit="ms" if router.config.is_cost_in_ms else "blocks",
            predicted_ttft_ms=decision.predicted_ttft_ms,
            ranked=self._ranked(decision),
            ranks=views,
            expires_s=expiry_s if select.reserve else None,
        )

    def _ranked(self, decision: Decision) -> list[RankedRank]:
        return [
            RankedRank(
                worker=each.rank.worker,
                url=self._fleet.url_of(each.rank.worker),
                dp_rank=each.rank.dp_rank,
                cost=each.cost,
            )
            for each in decision.ranked
        ]

    def _note(self, decision: Decision, prompt: _Prompt) -> None:
        """A reservation was made."""
        if prompt.tokens is None and prompt.hashes is None:
            self._audit.exclude(decision, "no_token_ids")
        self._fleet.ejections.note_sent(decision.rank.worker)
        counts = self._proxy.counts_of(decision.rank.worker)
        counts.num_requests += 1
        counts.num_prompt_tokens += prompt.num_tokens
        counts.num_cached_tokens += decision.cached_tokens

    def _decide(self, select: Select, prompt: _Prompt, options: RouteOptions) -> Decision:
        router = self._router
        if prompt.hashes is not None:
            if not select.reserve:
                return router.peek_hashed(prompt.hashes, prompt.num_tokens, **options)
            request_id = select.request_id
            return router.route_hashed(
                prompt.hashes, prompt.num_tokens, request_id=request_id, **options
            )
        tokens = NO_TOKENS if prompt.tokens is None else prompt.tokens
        more: Any = {"namespace": prompt.namespace, **options}
        if not select.reserve:
            return router.peek(tokens, **more)
        return router.route(tokens, request_id=select.request_id, **more)

    def _views(self, prompt: _Prompt, options: RouteOptions) -> list[RankView] | None:
        """None for a prompt of which only hashes are known, or nothing."""
        if prompt.tokens is None:
            return None
        among, namespace = options.get("workers") or (), prompt.namespace
        overlap = self._router.find_matches_for_request(prompt.tokens, namespace=namespace)
        loads = self._router.get_potential_loads(prompt.tokens, namespace=namespace)
        return [
            RankView(
                worker=load.rank.worker,
                dp_rank=load.rank.dp_rank,
                overlap_blocks=overlap.scores.get(load.rank, 0),
                potential_prefill_tokens=load.potential_prefill_tokens,
                potential_decode_blocks=load.potential_decode_blocks,
            )
            for load in loads
            if load.rank.worker in among
        ]

    def _headers_to(self, rank: Rank) -> dict[str, str]:
        has_ranks = self._fleet.has_ranks(rank.worker)
        return {RANK_HEADER: str(rank.dp_rank)} if has_ranks else {}

    def _reservation(self, request_id: str) -> Reservation:
        router = self._router
        with router.locked():
            found = router.load.find(request_id)
            rank = None if found is None else router.fleet_index.numbers.rank(found.rank_number)
        if found is None or rank is None:
            raise _unknown(request_id)
        now_s = router.clock()
        return Reservation(
            request_id=request_id,
            worker=rank.worker,
            dp_rank=rank.dp_rank,
            age_s=max(0.0, now_s - found.routed_s),
            expires_s=max(0.0, found.deadline_s - now_s),
            has_first_token=found.first_token_s is not None,
        )

    def _done(self, request: web.Request, is_done: bool) -> web.Response:
        """What was said twice is no error, what was said of nobody is one."""
        if not is_done:
            self._require_known(_id_of(request))
        return web.Response(status=204)

    def _require_known(self, request_id: str) -> None:
        if self._router.load.find(request_id) is None:
            raise _unknown(request_id)


def _id_of(request: web.Request) -> str:
    return request.match_info["id"]


def _unknown(request_id: str) -> ApiError:
    message = f"request {request_id!r} is not in flight: it was finished before, or expired"
    return ApiError(404, message, code="request_not_found")


def _body_of(select: Select, kind: str) -> tuple[bytes, str]:
    """The prompt as the body of an endpoint, which is read as a client's, and that endpoint."""
    if kind == "body":
        return msgspec.json.encode(select.body), select.path
    more = {name: getattr(select, name) for name in ("cache_salt", "extra_key")}
    body: dict[str, Any] = {name: value for name, value in more.items() if value}
    if select.model:
        body["model"] = select.model
    path = "/v1/completions"
    match kind:
        case "messages":
            body["messages"], path = select.messages, "/v1/chat/completions"
        case "token_ids":
            body["prompt"] = select.token_ids
        case _:
            body["prompt"] = select.text
    return msgspec.json.encode(body), path


def _answer(message: msgspec.Struct, status: int = 200) -> web.Response:
    body = msgspec.json.encode(message)
    return web.Response(body=body, status=status, content_type="application/json")
