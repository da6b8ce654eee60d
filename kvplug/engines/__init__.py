"""Plug-ins: what runs inside an engine's process; everything else runs beside it.

vllm            vLLM's side: registers the publisher `kvplug`
sglang          SGLang's side: the same
settings        what either of them was started with
publisher       batches from the engine's thread to sockets, without ever holding the engine up
replay_server   past batches again, for a follower that missed some
binding         a socket and its address, tried again while the address is taken

A simulated engine (kvplug.sim) publishes with the same publisher.

An engine is imported only inside functions, and Numba nowhere: vLLM 0.32 for the CPU does not start
in a process that has loaded it (docs/decisions.md, 10).
"""
