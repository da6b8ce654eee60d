"""The rows of the comparison: vLLM in a process of its own, for each kind of model and of request.

In:  the name of a row.   Out: the recipe of its engine, and how it is asked.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from examples.launch.engine_env import ensure_vllm
from tests.engines.engine_pool import Recipe
from tests.engines.line_engine import LineEngine
from tests.exactness.models import save_model

BLOCK_SIZE = 32
CHUNK = 4 * BLOCK_SIZE
HOST_BYTES = 2**23


def plainly(rnd):
    return {}


def with_salts(rnd):
    return {"salt": rnd.choice(["", "", "tenant-a", "tenant-b"])}


def with_full_reports(rnd):
    """Clients that have the engine publish the prefix that it reuses once more."""
    is_full = rnd.random() < 0.3
    return {"extra_args": {"kv_cache_report_mode": "full"}} if is_full else {}


def with_salts_and_resets(rnd):
    return with_salts(rnd) | {"reset": rnd.random() < 0.01}


def offloading(**more):
    """The settings of vLLM's connector, over copies in memory (tests/engines/memory_copies.py)."""
    extra = {"spec_name": "MemoryCopies", "spec_module_path": "memory_copies"}
    extra |= {"cpu_bytes_to_use": HOST_BYTES, **more}
    role = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {"kv_transfer_config": role | {"kv_connector_extra_config": extra}}


class Adapters:
    """Two of them; the weights of one change every 100 requests, in place."""

    def __init__(self):
        self._num_asked = 0

    def __call__(self, rnd):
        self._num_asked += 1
        lora, salt = rnd.choice([None, "x", "y"]), rnd.choice(["", "", "tenant-a"])
        weights = self._num_asked // 100 if lora == "x" else 0
        return {"salt": salt, "lora": lora, "weights": weights} if lora else {"salt": salt}


def eagle_in(folder):
    """The settings of an EAGLE head with random weights, written to this folder."""
    return {
        "method": "eagle",
        "model": str(save_model("draft", folder / "draft")),
        "num_speculative_tokens": 2,
        "draft_load_config": {"load_format": "dummy"},
    }


@dataclass(frozen=True)
class Row:
    """model: in tests/exactness/models.py; num_blocks: few enough to be full after some dozens of
    requests, and each group takes its own out of them; ask: what goes with a request; llm: what
    goes to vLLM; drafts: whether with an EAGLE head, which the router is told; has_adapters:
    whether requests name LoRA adapters.
    """

    model: str
    drafts: bool = False
    has_adapters: bool = False
    num_blocks: int = 100
    ask: Callable[[Any], dict] = plainly
    llm: dict = field(default_factory=dict)
    hides_states = False

    def recipe(self, name, wire="vllm"):
        def make(folder):
            speculative = {"speculative_config": eagle_in(folder)} if self.drafts else {}
            return LineEngine(
                name,
                ensure_vllm(),
                save_model(self.model, folder / self.model),
                block_size=BLOCK_SIZE,
                load_format="dummy",
                skip_tokenizer_init=True,
                wire=wire,
                enable_prefix_caching=True,
                num_gpu_blocks_override=self.num_blocks,
                lora=folder / "adapter" if self.has_adapters else None,
                **self.llm,
                **speculative,
            )

        return Recipe(name, make)


ROWS = {
    "full attention": Row("plain"),
    "full attention, salts": Row("plain", ask=with_salts),
    "full attention, chunks of 96 tokens": Row("plain", llm={"max_num_batched_tokens": 96}),
    "full attention, full reports": Row("plain", ask=with_full_reports),
    "full attention, two adapters, one loaded again in place": Row(
        "plain", ask=Adapters(), has_adapters=True
    ),
    "full attention, offloading": Row(
        "plain", num_blocks=60, ask=with_salts_and_resets, llm=offloading()
    ),
    "full attention, offloading, self-describing": Row(
        "plain",
        num_blocks=60,
        ask=with_salts_and_resets,
        llm=offloading(self_describing_kv_events=True),
    ),
    "full attention, offloading, chunks of 4 blocks": Row(
        "plain", num_blocks=60, llm=offloading(block_size=CHUNK)
    ),
    "full attention, offloading, self-describing, chunks of 4 blocks": Row(
        "plain", num_blocks=60, llm=offloading(self_describing_kv_events=True, block_size=CHUNK)
    ),
    "full attention, EAGLE": Row("plain", drafts=True),
    "a window and full attention (Gemma 3)": Row("window-and-full"),
    "five windows and full attention (Gemma 3)": Row("five-windows-and-full", num_blocks=300),
    "a window and full attention (gpt-oss)": Row("gpt-oss"),
    "states and full attention (LFM2)": Row("states-and-full"),
    "windows only (Mistral)": Row("windows-only"),
    "windows as full attention (Gemma 3)": Row(
        "window-and-full", llm={"disable_hybrid_kv_cache_manager": True}
    ),
}
