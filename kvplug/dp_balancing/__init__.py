"""Balancing data-parallel ranks inside the engine: by prefix and load, without a router process.

vllm        vLLM's front end asks for the rank of each request
sglang      SGLang's data-parallel controller does
rank_streams, private_streams   where the ranks publish; and how events are switched on
snapshots   what SGLang's ranks are busy with
multimodal  the keys of images and sounds in a prompt, block by block

balancer    whom they ask: a choice, or none, never an exception
warming     the compilation of the kernels, in a process of its own
chooser     a Router over the ranks, and followers of their events

All but `chooser` load no Numba: they are imported in processes that start engine cores, which do
not start where Numba is loaded (docs/decisions.md, 10). `balancer` imports the chooser in a thread,
once the cores run.
"""
