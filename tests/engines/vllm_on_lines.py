"""Run by vLLM's own interpreter: real vLLM in this process, asked by lines of JSON.

usage: python vllm_on_lines.py SETTINGS, as JSON: model, port, publisher (zmq or kvplug), lora, llm

In:  one object a line: prompts (token ids), salt, max_tokens, extra_args; lora, the name of an
adapter, and weights, the number of the folder that it is loaded from; reset, to empty the cache
before.
Out: one object a line: cached tokens of each prompt, the last message published, and the blocks in
the engine's pool, each with its group and under the id that its events use; those that its
offloading connector has, likewise. The first line comes
when it is ready.
"""

import json
import os
import sys
import time

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

from pathlib import Path

from published import last_number
from tiny_adapter import save_adapter
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash
from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx


def main(settings):
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Engine(settings)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.answer(**json.loads(line))), file=answers, flush=True)


def with_connector(llm):
    if "kv_transfer_config" not in llm:
        return llm
    return llm | {"kv_transfer_config": KVTransferConfig(**llm["kv_transfer_config"])}


class Engine:
    def __init__(self, settings):
        self.lora_folder = settings.get("lora")
        lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1} if self.lora_folder else {}
        self.lora_paths = {}
        if (
            settings["publisher"] == "kvplug"
        ):  # before the config: LLM(...) loads plug-ins only later
            from kvplug.engines.vllm import register

            register()
        # vLLM's own publisher binds a tcp endpoint only if it holds a `*`.
        address = "*" if settings["publisher"] == "zmq" else "127.0.0.1"
        self.llm = LLM(
            settings["model"],
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=4,
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=True,
                publisher=settings["publisher"],
                endpoint=f"tcp://{address}:{settings['port']}",
            ),
            **lora,
            **with_connector(settings["llm"]),
        )
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.scheduler, self.pool = scheduler, scheduler.kv_cache_manager.block_pool
        self.num_batches = 0
        self._publish = scheduler.kv_event_publisher.publish
        scheduler.kv_event_publisher.publish = self._count_and_publish

    def _count_and_publish(self, batch):
        self.num_batches += 1
        self._publish(batch)

    def last(self):
        """The number of the last message of the stream, once all batches are in messages."""
        publisher = self.scheduler.kv_event_publisher
        while (last := last_number(publisher, self.num_batches)) is None:
            time.sleep(0.001)
        return last

    def adapter(self, name, weights):
        """Loaded again in place if the weights are others than for the last request."""
        path = Path(f"{self.lora_folder}-{weights}")
        before = self.lora_paths.get(name, path)
        self.lora_paths[name] = path
        save_adapter(path)
        number = 1 + list(self.lora_paths).index(name)
        return LoRARequest(name, number, str(path), load_inplace=path != before)

    def offloaded(self):
        side = getattr(self.scheduler.connector, "connector_scheduler", None)
        if side is None:
            return []
        chunks = side.manager._policy.chunks
        return [
            (get_offload_group_idx(key), maybe_convert_block_hash(get_offload_block_hash(key)))
            for key, chunk in chunks.items()
            if chunk.is_ready
        ]

    def answer(
        self, prompts, salt=None, lora=None, weights=0, max_tokens=1, extra_args=None, reset=False
    ):
        if reset:
            assert self.scheduler.reset_prefix_cache()
        salted = {"cache_salt": salt} if salt else {}
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=ids, **salted) for ids in prompts],
            SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                temperature=0,
                detokenize=False,
                extra_args=extra_args,
            ),
            use_tqdm=False,
            lora_request=self.adapter(lora, weights) if lora else None,
        )
        keys = self.pool.cached_block_hash_to_block._cache
        return {
            "cached": [output.num_cached_tokens for output in outputs],
            "generated": [list(output.outputs[0].token_ids) for output in outputs],
            "last": self.last(),
            "blocks": [
                (get_group_id(key), maybe_convert_block_hash(get_block_hash(key))) for key in keys
            ],
            "offloaded": self.offloaded(),
        }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
