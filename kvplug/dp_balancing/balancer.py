"""Balancer: whom an engine's front end asks for the rank of a request, and who never fails it.

In:  where the ranks publish; requests.
Out: a rank, or None: the engine then chooses as it does without kvplug. Why is counted, and named
     once in the engine's log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvplug.curve_keys import ClientKeys
from kvplug.dp_balancing.multimodal import Item
from kvplug.dp_balancing.rank_streams import RankStream
from kvplug.errors import KvplugError
from kvplug.events import Namespace

if TYPE_CHECKING:
    from kvplug.dp_balancing.chooser import Chooser
    from kvplug.hashing import TokensLike

NOT_READY: Final = "not_ready"
NO_EVENTS: Final = "no_events"
RANKS_CHANGED: Final = "ranks_changed"

_SENTENCES: Final = {
    NOT_READY: "its kernels are being compiled, or its streams connected",
    NO_EVENTS: "no rank's event stream is connected",
    RANKS_CHANGED: "the number of ranks has changed",
}
_CONNECT_LIMIT_S: Final = 10.0
_CONNECT_POLL_S: Final = 0.05
_SUMMARY_PERIOD_S: Final = 60.0
_EXPIRY_S: Final = 600.0

_T = TypeVar("_T")


class Request(NamedTuple):
    """What is to be sent to a rank.

    tokens: None if equal tokens do not mean equal blocks, so that only load counts; has_extra_key:
    the same unless the ranks' events tell SGLang's extra_key, which is in `namespace`; items: the
    images and sounds among the tokens; rank: that the client has named, from 0.
    """

    request_id: str
    num_tokens: int
    tokens: TokensLike | None = None
    namespace: Namespace = Namespace()
    has_extra_key: bool = False
    items: Sequence[Item] = ()
    rank: int | None = None
    max_tokens: int | None = None
    reports_first_token: bool = True


class Balancer:
    """start; choose, note; read `num_left` by reason."""

    def __init__(
        self,
        engine: str,
        streams: Sequence[RankStream],
        logger: logging.Logger,
        *,
        keys: ClientKeys | None = None,
        expiry_s: float = _EXPIRY_S,
    ) -> None:
        """`engine`: its name in the log; `logger`: the engine's own; `expiry_s`: when a request
        counts as over, if nobody says that it is.
        """
        self.num_left: Counter[str] = Counter()
        self._engine, self._streams, self._logger = engine, streams, logger
        self._keys, self._expiry_s = keys, expiry_s
        self._chooser: Chooser | None = None
        self._named: set[str] = {NOT_READY}  # which is usual
        self._num_chosen = self._num_by_load = self._num_tokens = self._num_cached = 0
        self._summary_at_s = float("inf")
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(target=self._prepare, name="kvplug-balance", daemon=True)

    @property
    def is_ready(self) -> bool:
        """Whether it chooses."""
        return self._chooser is not None

    def start(self) -> None:
        """Compile, connect, and choose from then on. To be called once no more engine core starts
        from this process.
        """
        self._thread.start()

    def stop(self) -> None:
        """Choose for nobody any more."""
        self._has_stopped.set()
        chooser, self._chooser = self._chooser, None
        if chooser is not None:
            chooser.stop()

    def choose(self, describe: Callable[[], Request], num_ranks: int) -> int | None:
        """The rank for the request, which is load there until it is finished; None: let the engine
        choose among its `num_ranks`.
        """
        chooser = self._chooser
        try:
            if chooser is None or (reason := _why_not(chooser, num_ranks)):
                self._leave(NOT_READY if chooser is None else reason)
                return None
            request = describe()
            decision = chooser.choose(request)
        except Exception as error:  # noqa: BLE001 # the request must be served all the same
            self._leave(type(error).__name__, error)
            return None
        self._named.discard(NO_EVENTS)
        is_by_load = chooser.is_by_load(request)
        self._count(request, decision.cached_tokens, is_by_load=is_by_load)
        return decision.rank.dp_rank

    def note(self, act: Callable[[Chooser], _T]) -> _T | None:
        """Tell the chooser something of its requests; None if there is none, or it fails."""
        chooser = self._chooser
        if chooser is None:
            return None
        try:
            return act(chooser)
        except Exception as error:  # noqa: BLE001 # a wrong count must not end an engine
            self._leave(type(error).__name__, error)
            return None

    def _leave(self, reason: str, error: Exception | None = None) -> None:
        self.num_left[reason] += 1
        if reason not in self._named:
            self._named.add(reason)
            self._logger.warning(
                "kvplug: %s balances its data-parallel ranks itself: %s",
                self._engine,
                _SENTENCES.get(reason) or f"{reason}: {error}",
                exc_info=None if isinstance(error, KvplugError) else error,
            )

    def _count(self, request: Request, num_cached: int, *, is_by_load: bool) -> None:
        self._num_chosen += 1
        self._num_by_load += is_by_load
        self._num_tokens += request.num_tokens
        self._num_cached += num_cached
        now_s = time.monotonic()
        if now_s >= self._summary_at_s:
            self._summarize()
        if self._num_chosen == 1 or now_s >= self._summary_at_s:
            self._summary_at_s = now_s + _SUMMARY_PERIOD_S

    def _summarize(self) -> None:
        self._logger.info(
            "kvplug: chose the rank of %d requests (%d by load alone), where %d %% of their tokens "
            "were cached; left to %s: %s",
            self._num_chosen,
            self._num_by_load,
            100 * self._num_cached / max(self._num_tokens, 1),
            self._engine,
            ", ".join(f"{count} {reason}" for reason, count in self.num_left.items()) or "none",
        )

    def _prepare(self) -> None:
        try:
            from kvplug.dp_balancing.chooser import Chooser
            from kvplug.dp_balancing.warming import warm_up

            warm_up()
            chooser = Chooser(self._streams, self._keys, self._expiry_s)
            chooser.start()
            self._wait_for_streams(chooser)
        except Exception as error:  # noqa: BLE001 # the engine goes on without us
            self._leave(type(error).__name__, error)
            return
        self._chooser = chooser
        if self._has_stopped.is_set():
            self.stop()
        self._logger.info(
            "kvplug: chooses the data-parallel rank of each request by prefix and load; events of "
            "%d of %d ranks arrive",
            chooser.num_connected,
            chooser.num_ranks,
        )

    def _wait_for_streams(self, chooser: Chooser) -> None:
        deadline_s = time.monotonic() + _CONNECT_LIMIT_S
        while chooser.num_connected < chooser.num_ranks and time.monotonic() < deadline_s:
            if self._has_stopped.wait(_CONNECT_POLL_S):
                return


def _why_not(chooser: Chooser, num_ranks: int) -> str:
    if chooser.num_ranks != num_ranks:
        return RANKS_CHANGED
    return "" if chooser.num_connected else NO_EVENTS
