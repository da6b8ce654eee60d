"""vLLM's objects as far as kvplug touches them, by vLLM 0.32.0; tests/engines has the real ones."""

from collections import Counter
from types import SimpleNamespace as Bag


class Client:
    """DPLBAsyncMPClient: its own choice is the first rank."""

    def __init__(self, sources, *, client_count=1, first_rank=0, num_local=None):
        num_ranks = len(sources)
        self.engine_ranks_managed = list(range(first_rank, first_rank + num_ranks))
        self.core_engines = [rank.to_bytes(2, "little") for rank in self.engine_ranks_managed]
        self.reqs_in_flight, self.engine_inflight = {}, Counter()
        self.client_count, self.lb_engines = client_count, [[0, 0, 0.0]] * num_ranks
        local = num_ranks if num_local is None else num_local
        self.vllm_config = Bag(parallel_config=Bag(data_parallel_size_local=local))
        self._sources = sources

    def get_kv_event_sources(self):
        return self._sources

    def get_core_engine_for_request(self, request):
        if request.request_id in self.reqs_in_flight:
            return self.reqs_in_flight[request.request_id]
        engine = self.core_engines[request.data_parallel_rank or 0]
        self.reqs_in_flight[request.request_id] = engine
        return engine

    @staticmethod
    async def process_engine_outputs(self, outputs):
        for request_id in outputs.finished_requests or ():
            self.reqs_in_flight.pop(request_id, None)


def source(stream, publisher="kvplug"):
    return Bag(
        publisher=publisher,
        endpoint=stream.events,
        replay_endpoint=stream.replay,
        topic=stream.topic,
    )


def request(request_id, tokens, **fields):
    return Bag(
        **{
            "request_id": request_id,
            "prompt_token_ids": tokens,
            "prompt_embeds": None,
            "prompt_is_token_ids": None,
            "mm_features": None,
            "sampling_params": Bag(max_tokens=8),
            "pooling_params": None,
            "lora_request": None,
            "cache_salt": None,
            "data_parallel_rank": None,
            **fields,
        }
    )


def outputs(tokens_of=(), finished=()):
    produced = [Bag(request_id=name, new_token_ids=ids) for name, ids in dict(tokens_of).items()]
    return Bag(outputs=produced, finished_requests=set(finished) or None)
