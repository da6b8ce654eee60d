"""A plug-in for vLLM and SGLang, in tests only: how an engine makes its processes.

In:  $ENGINE_START_METHOD, fork or spawn; $ENGINE_EXECUTOR, uni or mp, for vLLM alone. What is not
     set stays as the engine has it.
Out: an engine that makes its processes so.

vLLM for the CPU spawns its engine core and that a worker; SGLang spawns a scheduler and a
detokenizer. Each of them imports PyTorch once more, which takes a core 15 s. Forked, they start in
none, and without a worker of its own an engine core does not spin while it waits for one. For a GPU
vLLM does both by default.
"""

import multiprocessing
import os


def register_in_vllm():
    from vllm.platforms.cpu import CpuPlatform

    if hasattr(CpuPlatform, "is_start_overruled"):
        return
    CpuPlatform.is_start_overruled = True
    original = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config):
        original(vllm_config)
        if method := os.environ.get("ENGINE_START_METHOD"):
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
        if executor := os.environ.get("ENGINE_EXECUTOR"):
            vllm_config.parallel_config.distributed_executor_backend = executor

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def register_in_sglang():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("ENGINE_START_METHOD"):
        target = "sglang.srt.entrypoints.engine._set_envs_and_config"
        HookRegistry.register(target, set_envs_and_start_method, HookType.AROUND)


def set_envs_and_start_method(set_envs_and_config, *args, **kwargs):
    set_envs_and_config(*args, **kwargs)
    multiprocessing.set_start_method(os.environ["ENGINE_START_METHOD"], force=True)
