"""Simulated engines: what vLLM does with its KV cache, without a model.

`python -m kvplug.sim` replays a trace or a log on a fleet of them; `python -m kvplug.sim.engine`
serves one.

request        one request: its tokens, the hashes of its full blocks
block_hashes   token ids -> block hashes, equal to vLLM's
pool           physical blocks: references, LRU, what is cached, events
kv_cache       blocks of requests: hits, allocation, freeing
scheduler      continuous batching: who runs in a step, with how many tokens
timing         how long a step takes
engine         SimulatedEngine, in virtual time
config, cli    the settings of a served engine, its command line
publisher      events over ZMQ, with replay
runner         steps in real time, tokens to whoever waits for them
tokenizer      text -> token ids and back
prompts        bodies of OpenAI's API -> requests
replies        emitted tokens -> answers of OpenAI's API
api, metrics, service
               HTTP around it: routes, Prometheus, start and stop
replay         traces and logs on many engines in virtual time: what would a policy have done?
"""
