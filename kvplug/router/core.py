"""Router: the worker that already holds a request's prefix, unless it is too busy.

In:  workers, their event batches, token ids.   Out: a Decision per request.

The whole request path is `Router.route`: hash the tokens, look them up, cost every rank, pick one,
account for it. A lock makes it safe to apply events in one thread and route in another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Unpack

from kvplug.errors import ConfigError
from kvplug.events import MoeLabel, Namespace, Rank
from kvplug.hashing import HashesLike, TokensLike, as_hashes, as_tokens, seed_of
from kvplug.index.block_copies import BlockCopies
from kvplug.router.arguments import checked_id, checked_rank
from kvplug.router.constraints import checked_names
from kvplug.router.decider import Decision
from kvplug.router.matches import OverlapScores, find_holders, find_matches
from kvplug.router.migration import Migration, Migrations
from kvplug.router.options import (
    NO_OPTIONS,
    MoeQuery,
    RouteOptions,
    checked_num_tokens,
    options_of,
)
from kvplug.router.potential_loads import PotentialLoad, potential_loads
from kvplug.router.prompt import NO_TOKENS, Prompt
from kvplug.router.saved_fleet import SavedFleet
from kvplug.router.shared_load import SharedLoad
from kvplug.setting import SHARE, shown


class Router(SavedFleet):
    """Requests: route, first_token, migrate, finish. Following workers: add_worker, apply, clear,
    remove_worker.

    Of a request that is not in flight (finished before, or expired) nothing can be said any more:
    first_token, add_output_block, moved, renew and finish return False then, else True.
    """

    @cached_property
    def shared_load(self) -> SharedLoad:
        """What other routers of this fleet say; it takes the lock (`locked`) to use it."""
        return SharedLoad(self.config, self._decider, self.fleet_index, self.load)

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
        hashes = as_hashes(sequence_hashes).copy()  # which counts until the request is over
        return self._route(Prompt(NO_TOKENS, 0, hashes, num_tokens), request_id, options)

    def _route(self, prompt: Prompt, request_id: str | None, given: RouteOptions) -> Decision:
        options = options_of(given) if given else NO_OPTIONS
        if request_id is not None:
            checked_id(request_id)
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

    def peek(
        self,
        token_ids: TokensLike,
        *,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        **options: Unpack[RouteOptions],
    ) -> Decision:
        """What `route` would decide now, with nothing counted, expected or learnt.

        Its request id is "". Errors as of `route`.
        """
        return self._peek(Prompt(as_tokens(token_ids), seed_of(namespace)), options)

    def _peek(self, prompt: Prompt, given: RouteOptions) -> Decision:
        options = options_of(given)
        with self._lock:
            if prompt.given is not None:
                self.fleet_index.require_hashed(len(prompt.given), len(prompt))
            now_s = self._now()
            plan = self._decider.plan(prompt, options, now_s)
            return self._decider.peek(prompt, plan, options, now_s)

    def peek_hashed(
        self,
        sequence_hashes: HashesLike,
        num_tokens: int,
        **options: Unpack[RouteOptions],
    ) -> Decision:
        """As `peek`, for a prompt that is hashed already; ConfigError as of `route_hashed`."""
        num_tokens = checked_num_tokens(num_tokens, "num_tokens", "route a request")
        hashes = as_hashes(sequence_hashes)
        return self._peek(Prompt(NO_TOKENS, 0, hashes, num_tokens), options)

    def best_worker_id(
        self,
        token_ids: TokensLike,
        *,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        **options: Unpack[RouteOptions],
    ) -> tuple[str, int]:
        """The worker that `route` would choose now, and leading blocks that it holds; as `peek`."""
        decision = self.peek(token_ids, namespace=namespace, **options)
        return decision.rank.worker, decision.overlap_blocks

    def get_potential_loads(
        self,
        token_ids: TokensLike,
        *,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
    ) -> list[PotentialLoad]:
        """What each rank would be busy with if the prompt went there; nothing is counted."""
        prompt = Prompt(as_tokens(token_ids), seed_of(namespace))
        with self._lock:
            now_s = self._now()
            return potential_loads(prompt, self.fleet_index, self.load, self._decider, now_s)

    def find_matches_for_request(
        self,
        token_ids: TokensLike,
        *,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        model: str = "",
        moe_query: MoeLabel | MoeQuery | None = None,
    ) -> OverlapScores:
        """What each rank has of the prompt; `model`: only workers that serve it; `moe_query`: count
        blocks that are labelled with this expert, too.
        """
        prompt = Prompt(as_tokens(token_ids), seed_of(namespace))
        label = moe_query.label if isinstance(moe_query, MoeQuery) else moe_query
        if label is not None and not isinstance(label, MoeLabel):
            raise ConfigError(f"moe_query must be a MoeLabel or a MoeQuery, got {shown(label)}")
        with self._lock:
            workers = self.fleet_index.workers_with(model, None) if model else None
            return find_matches(self.fleet_index, prompt, workers, label, self._clock())

    def holders_of(
        self,
        token_ids: TokensLike,
        *,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
    ) -> list[dict[Rank, BlockCopies]]:
        """For each full block of the prompt, which ranks have it, and where, by what events said.

        Of a fleet with several block sizes ConfigError: ask `index_of(rank)`.
        """
        prompt = Prompt(as_tokens(token_ids), seed_of(namespace))
        with self._lock:
            return find_holders(self.fleet_index, prompt)

    def first_token(self, request_id: str) -> bool:
        """The prefill is done: its tokens no longer weigh on the rank, whose speed is learnt.

        False, and nothing done, if that was known, or the request is not in flight.
        """
        checked_id(request_id)
        with self._lock:
            now_s = self._clock()
            request = self.load.first_token(request_id, now_s)
            if request is not None:
                self._speeds.learn_first_token(request, now_s)
            return request is not None

    def add_output_block(self, request_id: str, decay_fraction: float | None = None) -> bool:
        """The answer has filled another block, which counts as load until the request is over.

        `decay_fraction`: how much of the answer is left, 0 to 1: all blocks of the answer, and the
        last blocks of the prompt that no other request on the rank has, count this much from now
        on. False, and nothing done, if the request is not in flight; ConfigError for a fraction
        that is none.
        """
        if decay_fraction is not None and not SHARE.fits(decay_fraction):
            raise ConfigError(
                f"decay_fraction must be {SHARE.expected}, or None, got {shown(decay_fraction)}"
            )
        checked_id(request_id)
        with self._lock:
            return self.load.add_output_block(request_id, decay_fraction)

    def moved(self, request_id: str, rank: Rank) -> bool:
        """The data plane has sent the request to another rank: it is load there, with what that
        rank holds of it, and its prefill is still to be done.

        False, and nothing done, if it is not in flight; UnknownRankError for a rank that is not in
        the fleet. What follows of this request teaches no speeds.
        """
        checked_id(request_id), checked_rank(rank)
        with self._lock:
            number, now_s = self.fleet_index.numbers.number_of(rank), self._now()
            is_in_flight = self._bookings.move(request_id, number, now_s)
            if is_in_flight:
                self._observer.on_moved(request_id)
            return is_in_flight

    def adopt(
        self,
        request_id: str,
        rank: Rank,
        sequence_hashes: HashesLike,
        num_tokens: int,
        prefill_tokens: int | None = None,
    ) -> None:
        """Count a request that a peer has sent to a rank, until `finish`.

        `sequence_hashes`: of the full blocks of its `num_tokens` tokens; `prefill_tokens`: how many
        of these the peer expects to be computed, by default what this router finds. Such a request
        teaches no speeds. Nothing is done by what raises UnknownRankError for a rank that is not
        in the fleet, or ConfigError for an id that is in flight and numbers that do not fit.
        """
        checked_id(request_id), checked_rank(rank)
        attempt = f"adopt {request_id!r}"
        num_tokens = checked_num_tokens(num_tokens, "num_tokens", attempt)
        if prefill_tokens is not None:
            prefill_tokens = checked_num_tokens(
                prefill_tokens, "prefill_tokens", attempt, float(num_tokens)
            )
        hashes = as_hashes(sequence_hashes).copy()
        with self._lock:
            number, now_s = self.fleet_index.numbers.number_of(rank), self._now()
            self._decider.require_new(request_id, "adopt")
            self.fleet_index.group_of(rank).require_hashed(len(hashes), num_tokens)
            self._bookings.adopt(request_id, number, hashes, num_tokens, now_s, prefill_tokens)

    def renew(self, request_id: str) -> bool:
        """The request is still served: it counts as load for another `request_expiry_s`.

        False, and nothing done, if it is not in flight.
        """
        checked_id(request_id)
        with self._lock:
            return self.load.renew(request_id, self._clock())

    def finish(self, request_id: str, num_tokens: int | None = None) -> bool:
        """The request is over, for whatever reason; `num_tokens`: how long the answer was.

        False, and nothing done, if it is not in flight: it was finished before, or expired.
        ConfigError, and nothing done, for a number of tokens below 0.
        """
        checked_id(request_id)
        if num_tokens is not None:
            num_tokens = checked_num_tokens(num_tokens, "num_tokens", f"finish {request_id!r}")
        with self._lock:
            now_s = self._clock()
            request = self.load.finish(request_id, now_s)
            if request is None:
                return False
            self._decider.expire_expected(request, now_s)
            if num_tokens is not None:
                self._speeds.learn_answer(request, now_s, num_tokens)
                self._decider.note_answer(request, num_tokens, now_s)
            return True

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
        checked_id(request_id)
        options, excluded = options_of(given), checked_names(exclude, "exclude")
        with self._lock:
            if prompt.given is not None:
                self.fleet_index.require_hashed(len(prompt.given), len(prompt))
            now_s = self._now()
            on_moved = self._observer.on_moved
            migrations = Migrations(self.fleet_index, self.load, self._decider, on_moved)
            return migrations.migrate(request_id, prompt, excluded, options, now_s)
