"""Recipes for servers as a user starts them; and that they fork, so that they start soon.

In:  settings that differ from the usual ones.   Out: recipes of vLLM and SGLang servers.
"""

from pathlib import Path

from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from examples.launch.sglang_env import ensure_sglang
from examples.launch.sglang_server import SglangServer, SglangSettings
from examples.launch.vllm_server import VllmServer, VllmSettings
from tests.engines.engine_pool import Recipe

START_PLUGIN = Path(__file__).with_name("start_plugin")
# See the plug-in for what it means.
FORKED = {"ENGINE_START_METHOD": "fork", "ENGINE_EXECUTOR": "uni"}
# What kvplug's plug-in publishes there is vLLM's format.
STOCK_WIRE = {"KVPLUG_WIRE": "vllm"}
_ENV = {"PYTHONPATH": str(START_PLUGIN), **FORKED}


def vllm_server(name, kind=VllmServer, **settings):
    def make(folder):
        python = ensure_vllm()
        model_dir = ensure_tiny_model(python)
        given = VllmSettings(python=python, model_dir=model_dir, extra_env=_ENV, **settings)
        return kind(name, given, log_dir=folder)

    return Recipe(name, make)


def sglang_server(name, **settings):
    def make(folder):
        python = ensure_sglang()
        model_dir = ensure_tiny_model(python)
        given = SglangSettings(python=python, model_dir=model_dir, extra_env=_ENV, **settings)
        return SglangServer(name, given, log_dir=folder)

    return Recipe(name, make)
