"""SGLang's data-parallel controller asks kvplug for the rank of each request.

In:  `register`, in every process of SGLang; its arguments, requests and load snapshots.
Out: `TokenizedGenerateReqInput.routed_dp_rank`, as if a client had named it; SGLang does the rest.

Answers do not pass the controller. A request counts as load of kvplug's own until the rank's
snapshots have it (kvplug/dp_balancing/snapshots.py). SGLang's HookRegistry applies the hooks;
whatever fails leaves the choice to SGLang. SGLang is imported only inside functions; read against
SGLang 0.5.23.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvplug.curve_keys import ClientKeys
from kvplug.dp_balancing.balancer import Balancer, Request
from kvplug.dp_balancing.private_streams import private_streams
from kvplug.dp_balancing.rank_streams import RankStream, rank_stream
from kvplug.dp_balancing.snapshots import Snapshots
from kvplug.engines.binding import endpoint_of_rank
from kvplug.engines.settings import read_variables, warn
from kvplug.engines.sglang import NAME, logger
from kvplug.errors import ConfigError
from kvplug.events import Namespace, salt_with_extra_key

if TYPE_CHECKING:
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.server_args import ServerArgs

_LEFT: Final = "SGLang balances its data-parallel ranks itself"
_ARGUMENTS: Final = "sglang.srt.server_args.ServerArgs"
_CONTROLLER: Final = "sglang.srt.managers.data_parallel_controller.DataParallelController"
_MARK: Final = "_kvplug_dispatcher"
_DEFAULT_ENDPOINT: Final = "tcp://*:5557"
_PRESUMED_END_S: Final = 30.0
_BY_LOAD: Final = (
    "input_embeds",
    "mm_inputs",
    "lora_id",
    "extra_key",
    "positional_embed_overrides",
)


def register() -> None:
    """Have SGLang call us where arguments are resolved and requests dispatched."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_ARGUMENTS}.resolve_once", before_resolution, HookType.BEFORE)
    HookRegistry.register(f"{_CONTROLLER}.__init__", after_start, HookType.AFTER)
    HookRegistry.register(f"{_CONTROLLER}.dispatching_with_trace", before_dispatch, HookType.BEFORE)


def before_resolution(arguments: ServerArgs) -> None:
    """Switch on events, if nobody has, while arguments can still be changed."""
    try:
        if getattr(arguments, "_resolution_finished", False) or arguments.dp_size < 2:
            return
        if arguments.kv_events_config is None and arguments.nnodes == 1:
            config = {**private_streams(), "format": "dynamo"}
            arguments.kv_events_config = json.dumps(config)
    except Exception as error:  # noqa: BLE001  # SGLang's insides may have changed in any way
        warn(logger, _LEFT, error)


def after_start(
    _: None, controller: DataParallelController, *given: object, **named: object
) -> None:
    """The schedulers run: follow them."""
    try:
        dispatcher = Dispatcher(controller)
        dispatcher.balancer.start()
        setattr(controller, _MARK, dispatcher)
    except Exception as error:  # noqa: BLE001  # as above
        warn(logger, _LEFT, error)


def before_dispatch(
    controller: DataParallelController,
    request: TokenizedGenerateReqInput,
    *given: object,
    **named: object,
) -> None:
    """Name the rank in the request."""
    dispatcher: Dispatcher | None = getattr(controller, _MARK, None)
    if dispatcher is not None:
        dispatcher.choose(controller, request)


class Dispatcher:
    """What kvplug does beside the controller: choose, which never raises."""

    def __init__(self, controller: DataParallelController) -> None:
        """ConfigError if the ranks' events cannot be followed from here."""
        from sglang.srt.managers.utils import is_health_check_generate_req

        streams, keys = streams_of(controller.server_args), _keys_for(controller.server_args)
        # An end that no snapshot shows is presumed soon.
        self.balancer = Balancer("SGLang", streams, logger, keys=keys, expiry_s=_PRESUMED_END_S)
        self._is_health_check = is_health_check_generate_req
        self._snapshots = Snapshots(controller.load_snapshot_reader.read_all)

    def choose(
        self, controller: DataParallelController, request: TokenizedGenerateReqInput
    ) -> None:
        """Name the rank in the request, unless its client has, or SGLang must choose."""
        self.balancer.note(self._snapshots.report)
        if self._is_health_check(request) or _must_stay(request):
            return
        active, request_id = controller._active_workers, self._snapshots.new_id()
        rank = self.balancer.choose(lambda: request_of(request, request_id), len(active))
        if rank is None:
            return
        if rank in active:
            request.routed_dp_rank = rank
            self._snapshots.sent(request_id, rank)
        else:
            self.balancer.note(lambda chooser: chooser.router.finish(request_id))


def streams_of(arguments: ServerArgs) -> list[RankStream]:
    """Of each rank; ConfigError for what cannot be followed from here."""
    config = _events_config(arguments)
    endpoint, replay = config.get("endpoint", _DEFAULT_ENDPOINT), config.get("replay_endpoint")
    streams = []
    for rank in range(arguments.dp_size):
        asks = None if replay is None else endpoint_of_rank(replay, rank)
        events, topic = endpoint_of_rank(endpoint, rank), config.get("topic", "")
        streams.append(rank_stream(rank, events, asks, topic, is_local=True))
    return streams


def _events_config(arguments: ServerArgs) -> dict[str, Any]:
    if arguments.nnodes > 1:
        raise ConfigError(f"expected all ranks on this machine, got {arguments.nnodes} nodes")
    config: dict[str, Any] = json.loads(arguments.kv_events_config or "{}")
    publisher, endpoint = config.get("publisher", "null"), config.get("endpoint", "*")
    if publisher == "null":
        raise ConfigError("expected KV events, got none in --kv-events-config")
    if publisher == NAME and read_variables().nats is not None:
        raise ConfigError("expected KV events on sockets, and KVPLUG_NATS sends them to NATS")
    # SGLang's own publisher connects to an address without a wildcard.
    if publisher != NAME and not config.get("bind", "*" in endpoint or "::" in endpoint):
        raise ConfigError(f"expected a publisher that binds, got {publisher} at {endpoint}")
    return config


def request_of(request: TokenizedGenerateReqInput, request_id: str) -> Request:
    """What kvplug is asked. By load alone go images, embeddings and adapters, whose blocks are
    named by more than the controller sees.
    """
    tokens, sampling = request.input_ids, request.sampling_params
    extra_key = _text(request, "extra_key")
    is_plain = not any(getattr(request, name, None) for name in _BY_LOAD)
    return Request(
        request_id=request_id,
        num_tokens=0 if tokens is None else len(tokens),
        tokens=tokens if is_plain else None,
        namespace=Namespace(salt=salt_with_extra_key(_text(request, "cache_salt"), extra_key)),
        has_extra_key=bool(extra_key),
        rank=request.routed_dp_rank,
        max_tokens=getattr(sampling, "max_new_tokens", None),
        reports_first_token=False,
    )


def _text(request: TokenizedGenerateReqInput, name: str) -> str:
    """A field that requests for embeddings do not have."""
    return getattr(request, name, None) or ""


def _must_stay(request: TokenizedGenerateReqInput) -> bool:
    """Whether it belongs where SGLang sends it: its prefill, or its session, is there."""
    names = ("bootstrap_room", "session_id", "session_params")
    return any(getattr(request, name, None) is not None for name in names)


def _keys_for(arguments: ServerArgs) -> ClientKeys | None:
    """To read what kvplug's own publisher encrypts; stock ones do not."""
    is_ours = _events_config(arguments)["publisher"] == NAME
    keys = read_variables().keys if is_ours else None
    return None if keys is None else keys.as_client()
