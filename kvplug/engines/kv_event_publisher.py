"""A publisher for engines of one's own: the calls of Dynamo's KvEventPublisher, without its parts.

In:  token ids and block ids of an engine.
Out: our own event stream, or the stock one, on sockets or over NATS.

    >>> with KvEventPublisher("tcp://127.0.0.1:0", kv_block_size=4) as publisher:
    ...     publisher.publish_stored(
    ...         token_ids=range(8), num_block_tokens=[4, 4], block_hashes=[71, 72]
    ...     )
    0

What cannot be published raises ConfigError at once, and nothing is sent of it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import TracebackType
from typing import Final, TypedDict, Unpack, get_args

import msgspec

from kvplug import protocol
from kvplug._version import __version__
from kvplug.curve_keys import ServerKeys
from kvplug.engines.event_stream import EventStream
from kvplug.engines.life_stream import LifeStream
from kvplug.engines.nats_target import STREAM, WORKER, NatsTarget, is_nats
from kvplug.engines.numbered_batches import NumberedBatches
from kvplug.engines.publisher import Publisher
from kvplug.engines.publisher_arguments import (
    block_id,
    block_ids,
    block_size_of,
    cxl_of,
    event_id_of,
    extra_keys_of,
    moe_of,
    pool_of,
    row,
    state_of,
    text,
    tier_of,
    token_ids_of,
    whole_number,
    workers_of,
)
from kvplug.engines.settings import (
    CURVE_CLIENTS,
    CURVE_KEY_FILE,
    WIRE,
    PublisherConfig,
    PublisherVariables,
    WireName,
    read_variables,
    without_open_socket,
)
from kvplug.engines.stock_pools import StockPools
from kvplug.errors import ConfigError
from kvplug.events import (
    MAX_DP_SIZE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CxlMetadata,
    CxlState,
    CxlStateTransition,
    Event,
    EventBatch,
    MoeLabel,
    Namespace,
    Tier,
)
from kvplug.nats.settings import SERVERS, NatsSettings
from kvplug.nats.settings import VARIABLES as NATS_VARIABLES
from kvplug.protocol import Hello, WorkerHello
from kvplug.setting import shown
from kvplug.wire import to_wire

logger = logging.getLogger(__name__)

_MAX_RESERVED: Final = 4096


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
        kv_block_size: int | None = None,
        dp_rank: int = 0,
        answers_at: str | None = None,
        topic: str = "",
        keys: ServerKeys | None = None,
        wire: WireName = "kvplug",
        worker: str = "",
        nats: NatsSettings | None = None,
        zmq_config: object = None,
        **about: Unpack[AboutWorker],
    ) -> None:  # fmt: skip
        """Publish from now on. ConfigError for settings that cannot be; TransportError if an
        address is taken. With `nats`, or servers of NATS as the endpoint
        ("nats://a:4222,nats://b:4222"), events go there, under the name `worker`: the URL of the
        engine's API as the router's --worker has it. It is `url` if that is left out.

        keys, url, cxl_pools and topology that are left out are those of the KVPLUG_* variables, and
        so are the fleet and the credentials if `nats` is.

        zmq_config: a ZmqKvEventPublisherConfig of an engine whose events go from ZMQ to NATS; then
        nothing but `endpoint` and `nats` is asked for, and no call publishes.
        """
        if zmq_config is not None:
            kv_block_size = getattr(zmq_config, "kv_block_size", kv_block_size)
        self._block_size = block_size_of(kv_block_size)
        variables = _variables(keys)
        hello = _hello(self._block_size, dp_rank, about, variables)
        if zmq_config is not None:
            self._publisher = _forwarded(zmq_config, endpoint, nats)
        elif nats is not None or is_nats(endpoint):
            _require_no_sockets(answers_at=answers_at, topic=topic, keys=keys)
            self._publisher = _open_nats(wire, _target(endpoint, nats, worker), hello)
        else:
            _require_no_worker(worker)
            config = _config(endpoint=endpoint, replay_endpoint=answers_at, topic=topic)
            self._publisher = _open(wire, config, hello, keys or variables.keys)
        self._dp_rank, self._is_closed = hello.dp_rank, False
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
        num_block_tokens: Sequence[int] | None = None,
        block_hashes: Sequence[int] = (),
        lora_id: int = 0,
        parent_hash: int | None = None,
        **details: Unpack[BlockDetails],
    ) -> int:
        """Consecutive blocks are cached now; returns the id of the event.

        token_ids: those of all blocks in a row; num_block_tokens: how many each has, kv_block_size
        if given; parent_hash: the block before the first one.
        """
        self._require_id(event_id)
        _details(details)
        names, tokens = block_ids(block_hashes), token_ids_of(token_ids)
        self._require_blocks(len(tokens), num_block_tokens, names)
        namespace = _namespace(lora_id, details)
        parent = None if parent_hash is None else block_id(parent_hash)
        event = BlockStored(
            block_hashes=names,
            token_ids=tokens,
            block_size=self._block_size,
            parent=parent,
            namespace=None if parent is not None and namespace == Namespace() else namespace,
            tier=tier_of(details.get("tier", Tier.DEVICE)),
            extra_keys=extra_keys_of(details.get("extra_keys", ()), len(names)),
            cxl=cxl_of(details.get("cxl_metadata")),
            moe=moe_of(details.get("moe")),
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
        self._require_id(event_id)
        names = block_ids(block_hashes)
        event = BlockRemoved(block_hashes=names, tier=tier_of(tier))
        with self._lock:
            return self._publish(event, event_id, lambda: self._forget(names))

    def publish_all_cleared(self, event_id: int | None = None) -> int:
        """The engine holds nothing any more; returns the id of the event."""
        self._require_id(event_id)
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
        self._require_id(event_id)
        event = CxlStateTransition(
            block_hashes=block_ids(block_hashes),
            new_state=state_of(new_state),
            pool_id=pool_of(pool_id),
            accessible_workers=workers_of(accessible_workers),
        )
        with self._lock:
            return self._publish(event, event_id, lambda: None)

    def shutdown(self) -> None:
        """Send what is queued and close, in three seconds at worst; again is harmless."""
        with self._lock:
            self._is_closed = True
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
        if self._is_closed:
            raise ConfigError("cannot publish an event: the publisher was shut down")
        number = self._take_id(event_id)
        note()
        self._publisher.publish(EventBatch(events=(event,), dp_rank=self._dp_rank))
        return number

    def _take_id(self, event_id: int | None) -> int:
        number = event_id_of(self._next_id if event_id is None else event_id)
        if event_id is not None and number in self._reserved:
            del self._reserved[number]
            return number
        if number < self._next_id:
            raise ConfigError(
                f"event ids must rise: got {number}, expected {self._next_id} or more; leave "
                "event_id out to have one chosen"
            )
        self._next_id = number + 1
        return number

    def _require_id(self, event_id: object) -> None:
        # First of all: where it was forgotten, every other argument is in a wrong place, too.
        if event_id is not None:
            event_id_of(event_id)

    def _forget(self, names: Sequence[int]) -> None:
        for name in names:
            self._copies[name] -= 1
            if self._copies[name] <= 0:
                del self._copies[name]

    def _require_blocks(
        self, num_tokens: int, sizes: Sequence[int] | None, names: Sequence[int]
    ) -> None:
        size = self._block_size
        said = (size,) * len(names) if sizes is None else row(sizes, "num_block_tokens")
        given = [whole_number(each, "a size of num_block_tokens") for each in said]
        if any(each != size for each in given):
            raise ConfigError(
                f"cannot publish blocks of {shown(given)} tokens: expected blocks of "
                f"kv_block_size, {size}, in num_block_tokens"
            )
        if not len(names) == len(given) == num_tokens / size:
            raise ConfigError(
                f"cannot publish {len(names)} blocks with {len(given)} sizes and {num_tokens} "
                f"tokens: expected as many sizes as blocks, and {size} tokens for each"
            )


def _details(details: Mapping[str, object]) -> None:
    if unknown := sorted(set(details) - set(BlockDetails.__annotations__)):
        expected = ", ".join(BlockDetails.__annotations__)
        raise ConfigError(
            f"stored blocks have no {', '.join(unknown)}: expected, besides the tokens and ids of "
            f"the blocks, only {expected}"
        )


def _namespace(lora_id: object, details: BlockDetails) -> Namespace:
    lora_name = text(details.get("lora_name", ""), "lora_name")
    number = whole_number(lora_id, "lora_id")
    salt = text(details.get("cache_salt", ""), "cache_salt")
    return Namespace(lora_name or (str(number) if number else ""), salt)


def _open(
    wire: WireName, config: PublisherConfig, hello: WorkerHello, keys: ServerKeys | None
) -> LifeStream | NumberedBatches:
    _require_wire(wire)
    config = without_open_socket(config, keys, logger)
    if wire == "vllm":
        encode = _StockEncoder()
        return Publisher(config, hello.dp_rank, encode, logger, keys=keys, must_bind=True)
    return EventStream(config, hello, lambda batch: batch, logger, keys=keys, must_bind=True)


def _open_nats(
    wire: WireName, target: NatsTarget, hello: WorkerHello
) -> LifeStream | NumberedBatches:
    _require_wire(wire)
    if wire == "vllm":
        return target.open_batches(hello, _StockEncoder(), logger)
    return target.open_stream(hello, lambda batch: batch, logger)


def _forwarded(
    config: object, endpoint: str, nats: NatsSettings | None
) -> LifeStream | NumberedBatches:
    if nats is None and not is_nats(endpoint) and SERVERS not in os.environ:
        raise ConfigError(f"zmq_config needs servers of NATS: expected nats, or {SERVERS}")
    endpoint = endpoint if is_nats(endpoint) else os.environ.get(SERVERS, "")
    # By name, as what an engine imports has no part in forwarding.
    forwarding = import_module("kvplug.forwarder.in_process")
    made: LifeStream = forwarding.InProcessForwarder(config, _target(endpoint, nats, "").settings)
    return made


def _target(endpoint: str, settings: NatsSettings | None, worker: str) -> NatsTarget:
    """Where on NATS: as is said here, else as the environment says."""
    if settings is not None:
        return NatsTarget(settings=settings, worker=text(worker, "worker"))
    said = os.environ | {SERVERS: endpoint} | ({WORKER: worker} if worker else {})
    target = NatsTarget.from_variables(said)
    assert target is not None
    return target


def _require_wire(wire: object) -> None:
    if wire not in get_args(WireName):
        raise ConfigError(f'wire must be "kvplug" or "vllm", got {shown(wire)}')


def _require_no_sockets(**said: object) -> None:
    if names := [name for name, value in said.items() if value]:
        raise ConfigError(
            f"{', '.join(names)} belong to an endpoint of ZMQ: expected none of these with NATS"
        )


def _require_no_worker(worker: str) -> None:
    if worker:
        raise ConfigError(
            f"worker {shown(worker)} is a name on NATS: expected an endpoint like "
            "nats://127.0.0.1:4222, or nats=NatsSettings(...)"
        )


def _config(**said: object) -> PublisherConfig:
    try:
        return msgspec.convert(said, PublisherConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"cannot publish: {error}") from error


def _variables(keys: ServerKeys | None) -> PublisherVariables:
    """What the environment says; nothing of keys if the caller has some."""
    if keys is not None and not isinstance(keys, ServerKeys):
        raise ConfigError(f"keys must be a ServerKeys, got {type(keys).__name__}")
    passed_over = {WIRE, WORKER, STREAM, *NATS_VARIABLES}
    passed_over |= set() if keys is None else {CURVE_KEY_FILE, CURVE_CLIENTS}
    return read_variables({k: v for k, v in os.environ.items() if k not in passed_over})


def _hello(
    block_size: int, dp_rank: int, about: AboutWorker, variables: PublisherVariables
) -> WorkerHello:
    if unknown := sorted(set(about) - set(AboutWorker.__annotations__)):
        raise ConfigError(f"nothing is said of a worker by these names: {', '.join(unknown)}")
    said: dict[str, object] = {
        "url": variables.url,
        "topology": variables.topology,
        "cxl_pools": variables.cxl_pools,
        **about,
    }
    said |= {"kvplug_version": __version__, "block_size": block_size}
    said["dp_rank"] = whole_number(dp_rank, "dp_rank", MAX_DP_SIZE)
    pools = row(said["cxl_pools"], "cxl_pools")  # type: ignore[arg-type]
    said["cxl_pools"] = tuple(whole_number(each, "a pool of cxl_pools") for each in pools)
    try:
        hello = msgspec.convert(said, WorkerHello)
        protocol.encode(Hello(1, 0, 0.0, hello))
    except (msgspec.ValidationError, OverflowError, UnicodeEncodeError) as error:
        raise ConfigError(f"cannot tell followers of the worker: {error}") from error
    return hello


class _StockEncoder:
    """Batches as vLLM's own decoder reads them."""

    def __init__(self) -> None:
        self._pools = StockPools(tells_device=False)

    def __call__(self, batch: EventBatch) -> bytes:
        events = self._pools.on_wire([to_wire(event) for event in batch.events])
        return msgspec.msgpack.encode((batch.ts, events, batch.dp_rank))
