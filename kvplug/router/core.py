"""Router: the worker that already holds a request's prefix, unless it is too busy.

In:  workers, their event batches, token ids.   Out: a Decision per request.

The whole request path is `Router.route`: hash the tokens, look them up, cost every rank, pick one,
account for it. A lock makes it safe to apply events in one thread and route in another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvplug.errors import UnknownRequestError
from kvplug.events import Namespace
from kvplug.hashing import HashesLike, TokensLike, as_hashes, as_tokens, seed_of
from kvplug.router.decider import (
    NO_TOKENS,
    Answer,
    Decision,
    Prompt,
    checked_num_tokens,
)
from kvplug.router.followed_fleet import FollowedFleet


class Router(FollowedFleet):
    """Requests: route, first_token, finish. Following workers: add_worker, apply, clear,
    remove_worker.
    """

    def route(  # noqa: PLR0913 - all but the prompt by name
        self,
        token_ids: TokensLike,
        *,
        request_id: str | None = None,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        model: str = "",
        workers: Collection[str] | None = None,
        max_tokens: int | None = None,
        reports_first_token: bool = True,
    ) -> Decision:
        """Choose a rank for a prompt and count the request as its load until `finish`.

        `model` and `workers` narrow the choice; `max_tokens` is how long its answer may get.
        `reports_first_token`: False if nobody will call `first_token`, as for an answer that comes
        as a whole; the prefill then counts as done when it is predicted to be.
        Raises NoWorkerError if nobody can take it, HashingError for token ids outside u32,
        ConfigError for a request id that is in flight already, or a `max_tokens` below 0.
        """
        prompt = Prompt(as_tokens(token_ids), seed_of(namespace))
        answer = Answer(max_tokens, reports_first_token)
        with self._lock:
            now_s = self._clock()
            self.load.expire(now_s)
            candidates = self._decider.candidates(model, workers)
            return self._decider.decide(prompt, request_id, candidates, now_s, answer)

    def route_hashed(  # noqa: PLR0913
        self,
        sequence_hashes: HashesLike,
        num_tokens: int,
        *,
        request_id: str | None = None,
        model: str = "",
        workers: Collection[str] | None = None,
        max_tokens: int | None = None,
        reports_first_token: bool = True,
    ) -> Decision:
        """As `route`, for a prompt of so many tokens whose full blocks are hashed already.

        ConfigError for a fleet with several block sizes, and for more hashes than so many tokens
        have full blocks.
        """
        num_tokens = checked_num_tokens(num_tokens, "num_tokens", "route a request")
        hashes = as_hashes(sequence_hashes)
        prompt = Prompt(NO_TOKENS, 0, hashes, num_tokens)
        answer = Answer(max_tokens, reports_first_token)
        with self._lock:
            self.fleet_index.require_hashed(len(hashes), num_tokens)
            now_s = self._clock()
            self.load.expire(now_s)
            candidates = self._decider.candidates(model, workers)
            return self._decider.decide(prompt, request_id, candidates, now_s, answer)

    def route_many(
        self,
        prompts: Sequence[TokensLike],
        *,
        namespace: Namespace = Namespace(),  # noqa: B008 - immutable
        model: str = "",
        workers: Collection[str] | None = None,
        max_tokens: int | None = None,
        reports_first_token: bool = True,
    ) -> list[Decision]:
        """As `route` for each, in their order; in one call of a kernel if the fleet has one index.

        Nothing is routed if one of them cannot be.
        """
        arrays, seed = [as_tokens(prompt) for prompt in prompts], seed_of(namespace)
        answer = Answer(max_tokens, reports_first_token)
        with self._lock:
            now_s = self._clock()
            self.load.expire(now_s)
            candidates = self._decider.candidates(model, workers)
            return self._decider.decide_many(arrays, seed, candidates, now_s, answer)

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
