"""Real engines: environments with vLLM and SGLang and a tiny model, made once and kept."""

from pathlib import Path

import pytest

from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from kvplug.ingest.event_thread import EventThread
from tests.engines.engine_pool import EnginePool


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
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
def engine_pool(request, tmp_path_factory):
    with EnginePool(request.session.items, tmp_path_factory.mktemp) as pool:
        yield pool


@pytest.fixture(autouse=True)
def engines(request, engine_pool):
    """What the test is marked to use. Of every test: it also starts what later ones use."""
    yield engine_pool.begin(request.node)
    engine_pool.end(request.node)


@pytest.fixture
def engine(engines):
    [engine] = engines
    return engine


@pytest.fixture
def listener():
    listener = EventThread()
    listener.start()
    yield listener
    listener.stop()
