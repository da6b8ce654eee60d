"""Router: the worker that already holds a request's prefix, unless it is too busy.

In:  workers, their event batches, token ids.   Out: a Decision per request.

The whole request path is `Router.route`: hash the tokens, look them up, cost every rank, pick one,
account for it. A lock makes it safe to apply events in one thread and route in another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Unpack

from kvplug.errors import UnknownRequestError
from kvplug.events import Namespace
from kvplug.hashing import HashesLike, TokensLike, as_hashes, as_tokens, seed_of
from kvplug.router.constraints import checked_names
from kvplug.router.decider import Decision
from kvplug.router.followed_fleet import FollowedFleet
from kvplug.router.migration import Migration, Migrations
from kvplug.router.options import NO_OPTIONS, RouteOptions, checked_num_tokens, options_of
from kvplug.router.prompt import NO_TOKENS, Prompt


class Router(FollowedFleet):
    """Requests: route, first_token, migrate, finish. Following workers: add_worker, apply, clear,
    remove_worker.
    """

    def route(
        self,
        token_ids: TokensLike,
        *,
        request_id: str | None = None,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        **options: Unpack[RouteOptions],
    ) -> Decision:
        """Choose a rank for a prompt and count the request as its load until `finish`.

        `options` narrow the choice, or tell more of the request: kvplug/router/options.py has them,
        docs/api.md explains them. Raises NoWorkerError, with the constraint that left nobody, if no
        worker can take it; HashingError for token ids outside u32; ConfigError for a request id
        that is in flight already, and for options that make no sense.
        """
        return self._route(Prompt(as_tokens(token_ids), seed_of(namespace)), request_id, options)

    def route_hashed(
        self,
        sequence_hashes: HashesLike,
        num_tokens: int,
        *,
        request_id: str | None = None,
        **options: Unpack[RouteOptions],
    ) -> Decision:
        """As `route`, for a prompt of so many tokens whose full blocks are hashed already.

        ConfigError for a fleet with several block sizes, and for more hashes than so many tokens
        have full blocks.
        """
        num_tokens = checked_num_tokens(num_tokens, "num_tokens", "route a request")
        hashes = as_hashes(sequence_hashes)
        return self._route(Prompt(NO_TOKENS, 0, hashes, num_tokens), request_id, options)

    def _route(self, prompt: Prompt, request_id: str | None, given: RouteOptions) -> Decision:
        options = options_of(given) if given else NO_OPTIONS
        with self._lock:
            if prompt.given is not None:
                self.fleet_index.require_hashed(len(prompt.given), len(prompt))
            now_s = self._clock()
            self.load.expire(now_s)
            plan = self._decider.plan(prompt, options, now_s)
            return self._decider.decide(prompt, request_id, plan, options, now_s)

    def route_many(
        self,
        prompts: Sequence[TokensLike],
        *,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        **options: Unpack[RouteOptions],
    ) -> list[Decision]:
        """As `route` for each, in their order; in one call of a kernel if the fleet has one index.

        Nothing is routed if one of them cannot be.
        """
        arrays, seed = [as_tokens(prompt) for prompt in prompts], seed_of(namespace)
        checked = options_of(options)
        with self._lock:
            now_s = self._clock()
            self.load.expire(now_s)
            return self._decider.decide_many(arrays, seed, checked, now_s)

    def first_token(self, request_id: str) -> None:
        """The prefill is done: its tokens no longer weigh on the rank, whose speed is learnt."""
        with self._lock:
            now_s = self._clock()
            request = self.load.first_token(request_id, now_s)
            if request is not None:
                self._speeds.learn_first_token(request, now_s)

    def renew(self, request_id: str) -> None:
        """The request is still served: it counts as load for another `request_expiry_s`.

        Nothing is done if it is not in flight.
        """
        with self._lock:
            self.load.renew(request_id, self._clock())

    def finish(self, request_id: str, num_tokens: int | None = None) -> None:
        """The request is over, for whatever reason; `num_tokens`: how long the answer was.

        UnknownRequestError if it is not in flight; ConfigError, and nothing done, for a number of
        tokens below 0.
        """
        if num_tokens is not None:
            num_tokens = checked_num_tokens(num_tokens, "num_tokens", f"finish {request_id!r}")
        with self._lock:
            now_s = self._clock()
            request = self.load.finish(request_id, now_s)
            if request is None:
                raise UnknownRequestError(
                    f"cannot finish request {request_id!r}: it is not in flight "
                    "(finished before, or expired)"
                )
            self._decider.expire_expected(request, now_s)
            if num_tokens is not None:
                self._speeds.learn_answer(request, now_s, num_tokens)
                self._decider.note_answer(request, num_tokens, now_s)

    def migrate(
        self,
        request_id: str,
        token_ids: TokensLike,
        *,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        exclude: Collection[str] = (),
        **options: Unpack[RouteOptions],
    ) -> Migration:
        """The worker of a request in flight has failed: book the request on another one.

        `token_ids`: its prompt and the tokens generated so far; `exclude`: workers to leave out
        besides the one that it is on, as they have failed before. The options are those of `route`,
        `max_tokens` for what is left of the answer. Ranks that can read its blocks in a CXL pool
        come first (kvplug/router/migration.py). Old and new booking change in one step.

        UnknownRequestError if it is not in flight; NoWorkerError if nobody can take it;
        HashingError and ConfigError as of `route`. Then nothing has changed.
        """
        prompt = Prompt(as_tokens(token_ids), seed_of(namespace))
        return self._migrate(request_id, prompt, exclude, options)

    def migrate_hashed(
        self,
        request_id: str,
        sequence_hashes: HashesLike,
        num_tokens: int,
        *,
        exclude: Collection[str] = (),
        **options: Unpack[RouteOptions],
    ) -> Migration:
        """As `migrate`, for a prompt that is hashed already, with the blocks generated so far.

        ConfigError as of `route_hashed`.
        """
        num_tokens = checked_num_tokens(num_tokens, "num_tokens", f"migrate {request_id!r}")
        prompt = Prompt(NO_TOKENS, 0, as_hashes(sequence_hashes), num_tokens)
        return self._migrate(request_id, prompt, exclude, options)

    def _migrate(
        self, request_id: str, prompt: Prompt, exclude: Collection[str], given: RouteOptions
    ) -> Migration:
        options, excluded = options_of(given), checked_names(exclude, "exclude")
        with self._lock:
            if prompt.given is not None:
                self.fleet_index.require_hashed(len(prompt.given), len(prompt))
            now_s = self._clock()
            self.load.expire(now_s)
            migrations = Migrations(self.fleet_index, self.load, self._decider)
            return migrations.migrate(request_id, prompt, excluded, options, now_s)
