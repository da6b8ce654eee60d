"""Simulated engines: what vLLM does with its KV cache, without a model.

`python -m kvplug.sim` replays a trace or a log on a fleet of them; `python -m kvplug.sim.engine`
serves one.

In virtual time:

request         one request: its tokens, the hashes of its full blocks
pool            physical blocks: references, LRU, what is cached, events
kv_cache        blocks of requests: hits, allocation, freeing
scheduler       continuous batching: who runs in a step, with how many tokens
ranks           data-parallel ranks of one engine
engine          SimulatedEngine; as a program, the entry point of a served one
engine_config   how fast it is and how it is served, and the flags of both

Served:

engine_service  start and stop
publishing      its events over ZMQ, by the publishers of kvplug.engines
runner          steps in real time, tokens to whoever waits for them
api             the HTTP routes
completions     bodies of OpenAI's API -> requests, emitted tokens -> answers
tokenizer       text -> token ids, by bytes or by kvplug.tokenization, and back
vllm_metrics    Prometheus, under vLLM's names

replay          traces and logs on many engines in virtual time: what would a policy have done?
"""
