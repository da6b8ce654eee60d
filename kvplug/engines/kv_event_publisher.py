"""A publisher for engines of one's own: the calls of Dynamo's KvEventPublisher, without its parts.

In:  token ids and block ids of an engine.   Out: our own event stream, or the stock one.

    >>> with KvEventPublisher("tcp://127.0.0.1:0", kv_block_size=4) as publisher:
    ...     publisher.publish_stored(
    ...         token_ids=range(8), num_block_tokens=[4, 4], block_hashes=[71, 72]
    ...     )
    0

What cannot be published raises ConfigError at once, and nothing is sent of it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, TypedDict, Unpack

import msgspec

from kvplug._version import __version__
from kvplug.curve_keys import ServerKeys
from kvplug.engines.event_stream import EventStream
from kvplug.engines.publisher import Publisher
from kvplug.engines.settings import PublisherConfig, WireName, without_open_socket
from kvplug.engines.stock_pools import StockPools
from kvplug.errors import ConfigError
from kvplug.events import (
    MAX_BLOCK_SIZE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CxlMetadata,
    CxlState,
    CxlStateTransition,
    EngineHash,
    Event,
    EventBatch,
    MoeLabel,
    Namespace,
    Tier,
)
from kvplug.protocol import WorkerHello
from kvplug.wire import TIERS, to_wire

logger = logging.getLogger(__name__)

_U64: Final = 2**64
_MAX_TOKEN: Final = 2**32
_MAX_RESERVED: Final = 4096
_TIERS: Final = {**{tier.name.lower(): tier for tier in Tier}, **TIERS}


class AboutWorker(TypedDict, total=False):
    """What followers are told of the engine (kvplug.protocol.WorkerHello)."""

    engine: str
    engine_version: str
    model: str
    hash_space: str
    tokenizer: str
    capacity_blocks: int
    dp_size: int
    url: str
    topology: dict[str, str]
    cxl_pools: tuple[int, ...]


class BlockDetails(TypedDict, total=False):
    """More of stored blocks, as kvplug.BlockStored has it.

    lora_name: instead of lora_id; tier: a Tier, its name, or a medium of vLLM ("CPU", "CXL");
    cxl_metadata: a CxlMetadata, or a dict of its fields; moe: a MoeLabel; extra_keys: further
    64-bit keys of each block.
    """

    lora_name: str
    cache_salt: str
    tier: Tier | str
    cxl_metadata: CxlMetadata | Mapping[str, object] | None
    moe: MoeLabel | None
    extra_keys: Sequence[Sequence[int]]


class KvEventPublisher:
    """publish_stored, publish_removed, publish_all_cleared, publish_cxl_state_transition;
    next_event_id, shutdown; `with`. From any thread.

    Read endpoint and answers_at, where it is bound. Block ids may be signed or unsigned 64-bit
    numbers; event ids rise, within a rank.
    """

    def __init__(  # noqa: PLR0913 - settings, each with a default but one
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        kv_block_size: int,
        dp_rank: int = 0,
        answers_at: str | None = None,
        topic: str = "",
        keys: ServerKeys | None = None,
        wire: WireName = "kvplug",
        **about: Unpack[AboutWorker],
    ) -> None:  # fmt: skip
        """Publish from now on. ConfigError for settings that cannot be; TransportError if an
        address is taken.
        """
        self._block_size = _block_size(kv_block_size)
        hello = _hello(self._block_size, dp_rank, about)
        config = PublisherConfig(endpoint=endpoint, replay_endpoint=answers_at, topic=topic)
        self._publisher = _open(wire, config, hello, keys)
        self._dp_rank = dp_rank
        self._lock = threading.Lock()
        self._next_id = 0
        self._reserved: dict[int, None] = {}
        self._copies: Counter[int] = Counter()

    @property
    def endpoint(self) -> str:
        """Where events are published."""
        return self._publisher.endpoint

    @property
    def answers_at(self) -> str | None:
        """Where followers ask for what they missed."""
        return self._publisher.answers_at

    @property
    def num_dropped(self) -> int:
        """Events that were lost because the queue was full."""
        return self._publisher.num_dropped

    def next_event_id(self) -> int:
        """An id for one event, which no other call gets."""
        with self._lock:
            self._reserved[self._next_id] = None
            if len(self._reserved) > _MAX_RESERVED:
                del self._reserved[next(iter(self._reserved))]
            self._next_id += 1
            return self._next_id - 1

    def publish_stored(
        self,
        event_id: int | None = None,
        token_ids: Sequence[int] = (),
        num_block_tokens: Sequence[int] = (),
        block_hashes: Sequence[int] = (),
        lora_id: int = 0,
        parent_hash: int | None = None,
        **details: Unpack[BlockDetails],
    ) -> int:
        """Consecutive blocks are cached now; returns the id of the event.

        token_ids: those of all blocks in a row; num_block_tokens: how many each has, which is
        kv_block_size; parent_hash: the block before the first one.
        """
        names = _names(block_hashes)
        self._require_blocks(token_ids, num_block_tokens, names)
        lora_name = details.get("lora_name") or (str(lora_id) if lora_id else "")
        namespace = Namespace(lora_name, details.get("cache_salt", ""))
        parent = None if parent_hash is None else _name(parent_hash)
        event = BlockStored(
            block_hashes=names,
            token_ids=_tokens(token_ids),
            block_size=self._block_size,
            parent=parent,
            namespace=None if parent is not None and namespace == Namespace() else namespace,
            tier=_tier(details.get("tier", Tier.DEVICE)),
            extra_keys=tuple(tuple(each) for each in details.get("extra_keys", ())),
            cxl=_cxl(details.get("cxl_metadata")),
            moe=details.get("moe"),
        )
        with self._lock:
            if parent is not None and not self._copies[parent]:
                raise ConfigError(
                    f"cannot publish blocks behind parent_hash {parent_hash}: expected a block "
                    "that was published as stored and not removed since"
                )
            return self._publish(event, event_id, lambda: self._copies.update(names))

    def publish_removed(
        self,
        event_id: int | None = None,
        block_hashes: Sequence[int] = (),
        *,
        tier: Tier | str = "device",
    ) -> int:
        """One copy of each of these blocks is gone; returns the id of the event."""
        names = _names(block_hashes)
        event = BlockRemoved(block_hashes=names, tier=_tier(tier))
        with self._lock:
            return self._publish(event, event_id, lambda: self._forget(names))

    def publish_all_cleared(self, event_id: int | None = None) -> int:
        """The engine holds nothing any more; returns the id of the event."""
        with self._lock:
            return self._publish(AllBlocksCleared(), event_id, self._copies.clear)

    def publish_cxl_state_transition(
        self,
        event_id: int | None = None,
        block_hashes: Sequence[int] = (),
        new_state: CxlState | str = "local_gpu",
        pool_id: int | None = None,
        accessible_workers: Sequence[object] | None = None,
    ) -> int:
        """Blocks moved between a GPU and a CXL pool; returns the id of the event.

        new_state: local_gpu, in_transit, cxl_pooled or evicted. What is left out of pool and
        workers is as it was.
        """
        names, workers = _names(block_hashes), accessible_workers
        event = CxlStateTransition(
            block_hashes=names,
            new_state=_state(new_state),
            pool_id=pool_id,
            accessible_workers=None if workers is None else tuple(map(str, workers)),
        )
        with self._lock:
            return self._publish(event, event_id, lambda: None)

    def shutdown(self) -> None:
        """Send what is queued and close, in three seconds at worst; again is harmless."""
        self._publisher.shutdown()

    def __enter__(self) -> KvEventPublisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _publish(self, event: Event, event_id: int | None, note: Callable[[], object]) -> int:
        """With the lock held, so that events go out in the order of their ids."""
        number = self._take_id(event_id)
        note()
        self._publisher.publish(EventBatch(events=(event,), dp_rank=self._dp_rank))
        return number

    def _take_id(self, event_id: int | None) -> int:
        if event_id is None:
            event_id = self._next_id
        elif event_id in self._reserved:
            del self._reserved[event_id]
            return event_id
        if event_id < self._next_id:
            raise ConfigError(
                f"cannot publish event {event_id}: expected an id of {self._next_id} or more, as "
                "ids rise, or one of next_event_id"
            )
        self._next_id = event_id + 1
        return event_id

    def _forget(self, names: Sequence[int]) -> None:
        for name in names:
            self._copies[name] -= 1
            if self._copies[name] <= 0:
                del self._copies[name]

    def _require_blocks(
        self, token_ids: Sequence[int], sizes: Sequence[int], names: Sequence[int]
    ) -> None:
        size = self._block_size
        if any(each != size for each in sizes):
            raise ConfigError(
                f"cannot publish blocks of {sorted(set(sizes))} tokens: expected blocks of "
                f"kv_block_size, {size}, in num_block_tokens"
            )
        if not len(names) == len(sizes) == len(token_ids) / size:
            raise ConfigError(
                f"cannot publish {len(names)} blocks with {len(sizes)} sizes and "
                f"{len(token_ids)} tokens: expected as many sizes as blocks, and {size} tokens "
                "for each"
            )


def _open(
    wire: WireName, config: PublisherConfig, hello: WorkerHello, keys: ServerKeys | None
) -> EventStream | Publisher:
    if wire == "vllm":
        encode = _StockEncoder()
        return Publisher(config, hello.dp_rank, encode, logger, keys=keys, must_bind=True)
    if wire != "kvplug":
        raise ConfigError(f'wire must be "kvplug" or "vllm", got {wire!r}')
    config = without_open_socket(config, keys, logger)
    return EventStream(config, hello, lambda batch: batch, logger, keys=keys, must_bind=True)


def _hello(block_size: int, dp_rank: int, about: AboutWorker) -> WorkerHello:
    said = {"kvplug_version": __version__, "block_size": block_size, "dp_rank": dp_rank, **about}
    try:
        hello = msgspec.convert(said, WorkerHello)
    except msgspec.ValidationError as error:
        raise ConfigError(f"cannot tell followers of the worker: {error}") from error
    unknown = sorted(set(said) - set(WorkerHello.__struct_fields__))
    if unknown:
        raise ConfigError(f"nothing is said of a worker by these names: {', '.join(unknown)}")
    return hello


class _StockEncoder:
    """Batches as vLLM's own decoder reads them."""

    def __init__(self) -> None:
        self._pools = StockPools(tells_device=False)

    def __call__(self, batch: EventBatch) -> bytes:
        events = self._pools.on_wire([to_wire(event) for event in batch.events])
        return msgspec.msgpack.encode((batch.ts, events, batch.dp_rank))


def _block_size(size: object) -> int:
    if not isinstance(size, int) or not 1 <= size <= MAX_BLOCK_SIZE:
        raise ConfigError(f"kv_block_size must be in [1, {MAX_BLOCK_SIZE}], got {size!r:.40}")
    return size


def _names(block_hashes: Sequence[int]) -> tuple[EngineHash, ...]:
    if not len(block_hashes):
        raise ConfigError("cannot publish an event of no blocks: expected ids in block_hashes")
    return tuple(map(_name, block_hashes))


def _name(number: int) -> EngineHash:
    """Unsigned; engines that count in i64 are folded."""
    folded = int(number)
    if not -(2**63) <= folded < _U64:
        raise ConfigError(f"a block id must be a 64-bit integer, signed or not, got {number}")
    return EngineHash(folded % _U64)


def _tokens(token_ids: Sequence[int]) -> tuple[int, ...]:
    tokens = tuple(map(int, token_ids))
    if tokens and not 0 <= min(tokens) <= max(tokens) < _MAX_TOKEN:
        raise ConfigError(
            f"token ids must be in [0, 2**32), got {min(tokens)} to {max(tokens)} in token_ids"
        )
    return tokens


def _tier(said: Tier | str) -> Tier:
    if isinstance(said, Tier):
        return said
    found = _TIERS.get(said.lower(), _TIERS.get(said.upper()))
    if found is None:
        raise ConfigError(f"tier must be one of {', '.join(sorted(_TIERS))}, got {said!r}")
    return found


def _cxl(said: CxlMetadata | Mapping[str, object] | None) -> CxlMetadata | None:
    if said is None or isinstance(said, CxlMetadata):
        return said
    try:
        return msgspec.convert(dict(said), CxlMetadata)
    except msgspec.ValidationError as error:
        raise ConfigError(f"cannot use cxl_metadata: {error}") from error


def _state(said: CxlState | str) -> CxlState:
    try:
        return CxlState(said)
    except ValueError:
        expected = ", ".join(CxlState)
        raise ConfigError(f"new_state must be one of {expected}, got {said!r}") from None
