"""The engines of a demo, by kind, and the load that suits them.

In:  "sim", "vllm" or "sglang".   Out: servers that are not started yet, and numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.launch.engine_env import ensure_tiny_model, ensure_tiny_tokenizer, ensure_vllm
from examples.launch.engine_server import EngineServer
from examples.launch.plugin_env import ensure_plugin
from examples.launch.sglang_env import ensure_sglang
from examples.launch.sglang_server import SglangServer, SglangSettings
from examples.launch.sim_server import SimServer, SimSettings
from examples.launch.vllm_server import VllmServer, VllmSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Engines and load.

    The documents do not fit into one engine's cache, but into those of all together; concurrency
    is the number of requests in flight.
    """

    engines: Sequence[EngineServer]
    tokenizer_dir: Path
    num_documents: int
    num_requests: int
    concurrency: int


def simulated(log_dir: Path) -> Fleet:
    """Four simulated engines: 32 documents of about 41 blocks fill nine tenths of their caches."""
    tokenizer_dir = ensure_tiny_tokenizer()
    settings = SimSettings(tokenizer_dir=tokenizer_dir)
    return Fleet(
        engines=[SimServer(f"sim-{i}", settings, log_dir=log_dir) for i in range(4)],
        tokenizer_dir=tokenizer_dir,
        num_documents=32,
        num_requests=480,
        concurrency=8,
    )


def vllm(log_dir: Path) -> Fleet:
    """Two real vLLM engines with kvplug's publisher: 16 documents of about 20 blocks.

    In blocks of 32 tokens: they fill nine tenths of two caches of 192, so all fit only if each
    lives in one place, beside the questions of the requests in flight.
    """
    python = ensure_vllm()
    model_dir = ensure_tiny_model(python)
    settings = VllmSettings(
        python=python, model_dir=model_dir, num_gpu_blocks=192, plugin=ensure_plugin(python)
    )
    return Fleet(
        engines=[VllmServer(f"vllm-{i}", settings, log_dir=log_dir) for i in range(2)],
        tokenizer_dir=model_dir,
        num_documents=16,
        num_requests=240,
        concurrency=4,
    )


def sglang(log_dir: Path) -> Fleet:
    """Two real SGLang engines with kvplug's publisher, sized as the vLLM ones."""
    model_dir = ensure_tiny_model(ensure_vllm())  # torch and transformers make it
    python = ensure_sglang()
    settings = SglangSettings(
        python=python, model_dir=model_dir, num_blocks=192, plugin=ensure_plugin(python)
    )
    return Fleet(
        engines=[SglangServer(f"sglang-{i}", settings, log_dir=log_dir) for i in range(2)],
        tokenizer_dir=model_dir,
        num_documents=16,
        num_requests=240,
        concurrency=4,
    )


FLEETS: Mapping[str, Callable[[Path], Fleet]] = {
    "sim": simulated,
    "vllm": vllm,
    "sglang": sglang,
}
