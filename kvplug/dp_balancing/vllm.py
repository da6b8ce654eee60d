"""vLLM's front end asks kvplug for the rank of each request.

In:  `register`, in every process of vLLM; the config, requests, outputs and counts of vLLM.
Out: `EngineCoreRequest.data_parallel_rank`, as if a client had named it; vLLM does the rest.

Nothing is changed where no front end runs. A front end is found by the config that it makes: there
events are switched on, if nobody has, and the class of its client learns to ask. Whatever fails
leaves the choice to vLLM. vLLM is imported only inside functions; read against vLLM 0.32.0.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kvplug.curve_keys import ClientKeys
from kvplug.dp_balancing.balancer import Balancer, Request
from kvplug.dp_balancing.multimodal import Item
from kvplug.dp_balancing.private_streams import private_streams
from kvplug.dp_balancing.rank_streams import RankStream, rank_stream
from kvplug.engines.settings import read_variables, warn
from kvplug.engines.vllm import NAME, logger
from kvplug.errors import ConfigError
from kvplug.events import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_events import KVEventsConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

_LEFT: Final = "vLLM balances its data-parallel ranks itself"
_MARK: Final = "_kvplug_wraps"
_FRONT_END: Final = "_kvplug_front_end"


def register() -> None:
    """Look at configs that this process makes from now on; again is harmless."""
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is None:
        return  # an engine core's or a worker's process: they are given a config
    _wrap(arguments.EngineArgs, "create_engine_config", _preparing)


def _wrap(owner: type, name: str, wrap: Callable[[Any], Any], *, is_static: bool = False) -> None:
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        wrapped = functools.wraps(original)(wrap(original))
        setattr(wrapped, _MARK, original)
        setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)


def _preparing(create: Callable[..., VllmConfig]) -> Callable[..., VllmConfig]:
    def create_engine_config(self: EngineArgs, *given: object, **named: object) -> VllmConfig:
        config = create(self, *given, **named)
        try:
            _prepare(self, config, is_headless=bool(named.get("headless")))
        except Exception as error:  # noqa: BLE001  # vLLM's insides may have changed in any way
            warn(logger, _LEFT, error)
        return config

    return create_engine_config


def _prepare(arguments: EngineArgs, config: VllmConfig, *, is_headless: bool) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    parallel = config.parallel_config
    if is_headless or parallel.data_parallel_size < 2 or not isinstance(arguments, AsyncEngineArgs):
        return  # nobody chooses a rank here
    _require_a_choice(config)
    # One of several front ends is told where the ranks publish by the cores.
    starts_cores = arguments._api_process_count == 1 or arguments._api_process_rank < 0
    if starts_cores and config.kv_events_config is None:
        _switch_on_events(config)
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    make_ask(DPLBAsyncMPClient)


def _require_a_choice(config: VllmConfig) -> None:
    """ConfigError if vLLM's front end chooses no rank, or prefixes make no difference."""
    import vllm.envs as envs

    parallel, events = config.parallel_config, config.kv_events_config
    if parallel.data_parallel_external_lb:
        raise ConfigError("expected vLLM's own load balancing, got --data-parallel-external-lb")
    if envs.VLLM_USE_RUST_FRONTEND:
        raise ConfigError("expected the front end in Python, got VLLM_USE_RUST_FRONTEND")
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError("expected prefix caching, which is off")
    if events is not None and not (events.enable_kv_cache_events and events.publisher != "null"):
        raise ConfigError("expected KV events, which --kv-events-config switches off")
    if read_variables().nats is not None:
        raise ConfigError("expected KV events on sockets, and KVPLUG_NATS sends them to NATS")


def _switch_on_events(config: VllmConfig) -> None:
    from vllm.config.kv_events import KVEventsConfig

    parallel = config.parallel_config
    are_all_here = parallel.data_parallel_size_local == parallel.data_parallel_size
    if not (are_all_here or parallel.data_parallel_hybrid_lb):
        raise ConfigError(
            "expected --kv-events-config with a tcp endpoint on each node, as only "
            f"{parallel.data_parallel_size_local} of {parallel.data_parallel_size} ranks run here"
        )
    fields: dict[str, Any] = private_streams()
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, **fields)


def make_ask(kind: type[DPLBAsyncMPClient]) -> None:
    """Have clients of this class ask kvplug; again is harmless. AttributeError, and nothing done,
    if vLLM's methods are not there.
    """
    names = ("__init__", "get_core_engine_for_request", "process_engine_outputs")
    for name in names:
        getattr(kind, name)
    _wrap(kind, names[0], _attaching)
    _wrap(kind, names[1], _choosing)
    # vLLM looks it up on the class and calls it with the client.
    _wrap(kind, names[2], _noting, is_static=True)


def _attaching(create: Callable[..., None]) -> Callable[..., None]:
    def attach(self: DPLBAsyncMPClient, *given: object, **named: object) -> None:
        create(self, *given, **named)  # returns when all cores run
        try:
            front_end = FrontEnd(self)
            front_end.balancer.start()
            weakref.finalize(self, front_end.balancer.stop).atexit = False
            setattr(self, _FRONT_END, front_end)
        except Exception as error:  # noqa: BLE001  # as above
            warn(logger, _LEFT, error)

    return attach


def _choosing(choose: Callable[..., bytes]) -> Callable[..., bytes]:
    def get_core_engine_for_request(self: DPLBAsyncMPClient, request: EngineCoreRequest) -> bytes:
        front_end: FrontEnd | None = getattr(self, _FRONT_END, None)
        if front_end is None or request.request_id in self.reqs_in_flight:
            return choose(self, request)
        front_end.choose(self, request)
        engine = choose(self, request)  # does vLLM's bookkeeping, too
        front_end.sent(self, request, engine)
        return engine

    return get_core_engine_for_request


def _noting(process: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def process_engine_outputs(self: DPLBAsyncMPClient, outputs: EngineCoreOutputs) -> None:
        front_end: FrontEnd | None = getattr(self, _FRONT_END, None)
        if front_end is not None:
            front_end.received(self, outputs)
        await process(self, outputs)

    return process_engine_outputs


class FrontEnd:
    """What kvplug does beside one client of vLLM: choose, sent, received. None of them raises."""

    def __init__(self, client: DPLBAsyncMPClient) -> None:
        """ConfigError if the ranks' events cannot be followed from here."""
        sources = client.get_kv_event_sources()
        self.balancer = Balancer(
            "vLLM", streams_of(client, sources), logger, keys=_keys_for(sources)
        )
        self._num_tokens: dict[str, int] = {}  # of the answer, by request in flight
        self._counts: object = client.lb_engines

    def choose(self, client: DPLBAsyncMPClient, request: EngineCoreRequest) -> None:
        """Name the rank in the request, unless its client has, or vLLM must choose."""
        self._look_at_counts(client)
        if _must_stay(request):
            return
        num_ranks = len(client.core_engines)
        rank = self.balancer.choose(lambda: request_of(request), num_ranks)
        if rank is not None:
            request.data_parallel_rank = rank
            self._num_tokens[request.request_id] = 0

    def sent(self, client: DPLBAsyncMPClient, request: EngineCoreRequest, engine: bytes) -> None:
        """It has gone there. What vLLM has chosen itself is load as well."""
        request_id = request.request_id
        if request_id not in self._num_tokens and self.balancer.is_ready:
            rank, num_tokens = client.core_engines.index(engine), _num_tokens_of(request)
            self._num_tokens[request_id] = 0
            self.balancer.note(lambda chooser: chooser.adopt(request_id, rank, num_tokens))

    def received(self, client: DPLBAsyncMPClient, outputs: EngineCoreOutputs) -> None:
        """First tokens and ends, aborts included."""
        self._look_at_counts(client)
        known = self._num_tokens
        for output in outputs.outputs if known else ():
            before = known.get(output.request_id)
            if before is not None:
                known[output.request_id] = before + len(output.new_token_ids)
                if before == 0:
                    self._note_first_token(output.request_id)
        for request_id in outputs.finished_requests or ():
            num_tokens = known.pop(request_id, None)
            if num_tokens is not None:
                self._note_end(request_id, num_tokens)

    def _note_first_token(self, request_id: str) -> None:
        self.balancer.note(lambda chooser: chooser.router.first_token(request_id))

    def _note_end(self, request_id: str, num_tokens: int) -> None:
        self.balancer.note(lambda chooser: chooser.router.finish(request_id, num_tokens))

    def _look_at_counts(self, client: DPLBAsyncMPClient) -> None:
        """With several front ends: what the cores are busy with, every 100 ms in a new list. Until
        the next one, vLLM adds to this one what it chooses itself.
        """
        counts = client.lb_engines
        if client.client_count > 1 and counts is not self._counts:
            self._counts = counts
            reported = [(int(running), int(waiting)) for waiting, running, *_ in counts]
            self.balancer.note(lambda chooser: chooser.report(reported))


def streams_of(
    client: DPLBAsyncMPClient, sources: Mapping[int, KVEventsConfig]
) -> list[RankStream]:
    """Of each rank that the client chooses among, in its order; ConfigError for one without."""
    num_local = client.vllm_config.parallel_config.data_parallel_size_local
    streams = []
    for place, engine_rank in enumerate(client.engine_ranks_managed):
        source = sources.get(engine_rank)
        if source is None:
            raise ConfigError(f"expected KV events of every rank, rank {engine_rank} has none")
        found = source.endpoint, source.replay_endpoint, source.topic
        streams.append(rank_stream(engine_rank, *found, is_local=place < num_local))
    return streams


def request_of(request: EngineCoreRequest) -> Request:
    """What kvplug is asked. Prompts of embeddings go by load alone."""
    tokens, lora, sampling = request.prompt_token_ids, request.lora_request, request.sampling_params
    is_embedded = request.prompt_embeds is not None or request.prompt_is_token_ids is not None
    return Request(
        request_id=request.request_id,
        num_tokens=_num_tokens_of(request),
        tokens=None if is_embedded else tokens,
        namespace=Namespace(lora.lora_name if lora else "", request.cache_salt or ""),
        items=[_item(feature) for feature in request.mm_features or ()],
        rank=request.data_parallel_rank,
        max_tokens=sampling.max_tokens if sampling is not None else None,
    )


def _item(feature: Any) -> Item:  # noqa: ANN401  # a MultiModalFeatureSpec
    at = feature.mm_position
    return Item(feature.identifier, at.offset, at.length)


def _num_tokens_of(request: EngineCoreRequest) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return 0 if request.prompt_embeds is None else len(request.prompt_embeds)


def _must_stay(request: EngineCoreRequest) -> bool:
    """Whether it belongs to the rank that has its other half: late interaction scores a document
    where the query's embeddings are.
    """
    pooling = request.pooling_params
    return pooling is not None and pooling.late_interaction_params is not None


def _keys_for(sources: Mapping[int, KVEventsConfig]) -> ClientKeys | None:
    """To read what kvplug's own publishers encrypt; stock ones do not."""
    if not any(source.publisher == NAME for source in sources.values()):
        return None
    keys = read_variables().keys
    return None if keys is None else keys.as_client()
