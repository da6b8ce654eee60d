"""Real engines: environments with vLLM and SGLang and a tiny model, made once and kept."""

import pytest

from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from examples.launch.sglang_env import ensure_sglang
from examples.launch.vllm_server import VllmServer, VllmSettings


def pytest_collection_modifyitems(items):
    for item in items:
        if "/engines/" in item.path.as_posix():
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session", autouse=True)
def scratch(tmp_path_factory):
    """Engines leave sockets and files behind when they are killed: with what pytest removes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("scratch")))
        yield


@pytest.fixture(scope="session")
def vllm_python():
    return ensure_vllm()


@pytest.fixture(scope="session")
def tiny_model(vllm_python):
    return ensure_tiny_model(vllm_python)


@pytest.fixture(scope="session")
def sglang_python():
    return ensure_sglang()


@pytest.fixture(scope="session")
def sglang_model(sglang_python):
    return ensure_tiny_model(sglang_python)


@pytest.fixture(scope="module")
def two_engines(vllm_python, tiny_model, tmp_path_factory):
    """Two vLLM servers; a test that kills one starts it again."""
    log_dir = tmp_path_factory.mktemp("engines")
    settings = VllmSettings(python=vllm_python, model_dir=tiny_model, num_gpu_blocks=160)
    engines = [VllmServer(f"vllm-{i}", settings, log_dir=log_dir) for i in range(2)]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines:
            engine.stop()
