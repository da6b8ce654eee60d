"""Engines and routers as child processes, for the demo and for the tests.

vllm_server, sglang_server, sim_server   engines; engine_server is what they share
router_process                           the standalone router
engine_env, sglang_env                   environments that are installed once, with a tiny model
child_process, endpoint, ports           processes, HTTP, free ports
"""
