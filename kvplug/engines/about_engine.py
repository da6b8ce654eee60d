"""What an engine is: what a publisher says of it in its hello.

In:  the process of an engine that makes its publisher (vLLM 0.32.0, SGLang 0.5.23), our variables.
Out: a WorkerHello; what cannot be found stays "" or None, and nothing raises.

vLLM does not tell a publisher its config. The scheduler that makes it has it, so it is looked for
in the callers' frames.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

from kvplug._version import __version__
from kvplug.engines.settings import PublisherVariables
from kvplug.protocol import WorkerHello

ADDRESS: Final = "KVPLUG_ENGINE_ADDRESS"
"""Where vLLM's API server listens: its process tells it to those of engine cores that it starts.

0.0.0.0 stands for the machine that the events come from.
"""

DP_SIZE: Final = "KVPLUG_ENGINE_DP_SIZE"
"""Its --data-parallel-size: vLLM tells the cores of models without experts that they are alone."""

_ANY: Final = "0.0.0.0"
_T = TypeVar("_T")


def note_address(arguments: Sequence[str] | None = None) -> None:
    """Remember where this process listens, if it is vLLM's API server: for its children."""
    arguments = sys.argv if arguments is None else arguments
    if "serve" in arguments[1:2] or any("api_server" in each for each in arguments[:1]):
        port = _option(arguments, "--port") or "8000"
        if port.isdecimal():
            host, is_tls = (
                _option(arguments, "--host") or _ANY,
                _option(arguments, "--ssl-certfile"),
            )
            os.environ.setdefault(ADDRESS, _url(host, int(port), bool(is_tls)))
        dp_size = _option(arguments, "--data-parallel-size") or _option(arguments, "-dp") or "1"
        if dp_size.isdecimal():
            os.environ.setdefault(DP_SIZE, dp_size)


def about_vllm(dp_rank: int, variables: PublisherVariables) -> WorkerHello:
    """Of the vLLM whose scheduler calls this."""
    config = _first(_vllm_configs())
    at = _Path(config)
    return WorkerHello(
        engine="vllm",
        engine_version=_version_of("vllm"),
        kvplug_version=__version__,
        model=_as(str, _vllm_model(at)) or "",
        block_size=_as(int, at("cache_config", "block_size")),
        hash_space=_hash_space("vllm", at("cache_config", "prefix_caching_hash_algo")),
        tokenizer=_or_nothing(lambda: tokenizer_of(_vllm_tokenizer(at)), ""),
        capacity_blocks=_vllm_capacity(at),
        dp_rank=dp_rank,
        dp_size=max(dp_rank + 1, *_vllm_dp_sizes(at)),
        url=variables.url or os.environ.get(ADDRESS, ""),
        topology=variables.topology,
        cxl_pools=variables.cxl_pools,
    )


def about_sglang(dp_rank: int, variables: PublisherVariables) -> WorkerHello:
    """Of the SGLang whose scheduler calls this."""
    at = _Path(_first(_sglang_arguments()))
    scheduler = _Path(_first(_owners_of("is_hybrid_swa")))
    page_size = _as(int, at("page_size"))
    num_tokens = _as(int, scheduler("max_total_num_tokens"))
    return WorkerHello(
        engine="sglang",
        engine_version=_version_of("sglang"),
        kvplug_version=__version__,
        model=_as(str, at("served_model_name")) or _as(str, at("model_path")) or "",
        block_size=page_size,
        bigrams=_as(str, at("speculative_algorithm")) in ("EAGLE", "EAGLE3"),
        hash_space="sglang",
        tokenizer=_or_nothing(lambda: tokenizer_of(_sglang_tokenizer(at)), ""),
        capacity_blocks=num_tokens // page_size if num_tokens and page_size else None,
        dp_rank=dp_rank,
        dp_size=_as(int, at("dp_size")) or 1,
        url=variables.url or _sglang_url(at),
        topology=variables.topology,
        cxl_pools=variables.cxl_pools,
        hides_states=bool(scheduler("is_hybrid_swa") or scheduler("is_hybrid_ssm")),
    )


def tokenizer_of(folder: str) -> str:
    """The first 16 hex digits of the SHA-256 of tokenizer.json in a folder, "" without one."""
    file = Path(folder) / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if folder and file.is_file() else ""


def vllm_scheduler() -> Any:  # noqa: ANN401
    """The scheduler of vLLM that is being made by this thread, None if there is none."""
    return _first(_owners_of("update_from_output"))


def vllm_core() -> Any:  # noqa: ANN401
    """The engine core of vLLM that is being made by this thread, None if there is none."""
    return _first(_owners_of("preprocess_add_request"))


class _Path:
    """Attributes of attributes; None where there is none."""

    def __init__(self, start: object) -> None:
        self._start = start

    def __call__(self, *names: str) -> object:
        found = self._start
        for name in names:
            found = getattr(found, name, None)
        return found


def _vllm_configs() -> Iterator[object]:
    """The config of the scheduler that calls, else what vLLM says is the current one."""
    for owner in _owners_of("vllm_config"):
        yield getattr(owner, "vllm_config", None)
    with suppress(Exception):
        from vllm.config import get_current_vllm_config

        yield get_current_vllm_config()


def _sglang_arguments() -> Iterator[object]:
    """The arguments of the server: of the scheduler that calls, else of its process."""
    for owner in _owners_of("server_args"):
        yield getattr(owner, "server_args", None)
    with suppress(Exception):
        from sglang.srt.runtime_context import get_server_args

        yield get_server_args()


def _owners_of(name: str) -> Iterator[object]:
    """Objects with this attribute whose methods are running in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        with suppress(Exception):
            if getattr(owner, name, None) is not None:
                yield owner
        frame = frame.f_back


def _first(found: Iterator[object]) -> object:
    return next((each for each in found if each is not None), None)


def _vllm_model(at: _Path) -> object:
    names = at("model_config", "served_model_name")
    if isinstance(names, list | tuple):
        names = names[0] if names else None
    return names or at("model_config", "model")


def _vllm_capacity(at: _Path) -> int | None:
    """Without the null block, which vLLM keeps for itself."""
    num_blocks = _as(int, at("cache_config", "num_gpu_blocks"))
    return num_blocks - 1 if num_blocks else None


def _vllm_dp_sizes(at: _Path) -> tuple[int, int]:
    """What is said of it, by the core's config and by its parent."""
    said = os.environ.get(DP_SIZE, "")
    size = _as(int, at("parallel_config", "data_parallel_size")) or 1
    return size, int(said) if said.isdecimal() else 1


def _vllm_tokenizer(at: _Path) -> str:
    return _as(str, at("model_config", "tokenizer")) or ""


def _hash_space(engine: str, algorithm: object) -> str:
    """Who hashes in the same way, from the same seed, gives equal blocks equal hashes.

    "" for vLLM's xxHash without a seed, which starts from a secret of each process.
    """
    seed = os.environ.get("PYTHONHASHSEED", "")
    if str(algorithm).startswith("xxhash") and not seed.isdecimal():
        return ""
    return "-".join(str(each) for each in (engine, algorithm, seed) if each)


def _sglang_tokenizer(at: _Path) -> str:
    return _as(str, at("tokenizer_path")) or _as(str, at("model_path")) or ""


def _sglang_url(at: _Path) -> str:
    host, port = _as(str, at("host")), _as(int, at("port"))
    return _url(host, port, bool(at("ssl_certfile"))) if host and port else ""


def _url(host: str, port: int, is_tls: bool) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{name}:{port}"


def _version_of(package: str) -> str:
    from importlib.metadata import version

    return _or_nothing(lambda: version(package), "") or _or_nothing(
        lambda: str(sys.modules[package].__version__), ""
    )


def _option(arguments: Sequence[str], name: str) -> str | None:
    for at, argument in enumerate(arguments):
        if argument == name and at + 1 < len(arguments):
            return arguments[at + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def _as(kind: type[_T], value: object) -> _T | None:
    return value if isinstance(value, kind) else None


def _or_nothing(find: Callable[[], _T], nothing: _T) -> _T:
    """What is found, or nothing, whatever goes wrong: an engine's insides may have changed."""
    try:
        return find()
    except Exception:  # noqa: BLE001
        return nothing
