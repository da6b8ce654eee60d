"""The tests of the stock format choose it; those of our own wire leave what is the default."""

import pytest


@pytest.fixture
def stock_wire(monkeypatch):
    """What the plug-ins publish is vLLM's format."""
    monkeypatch.setenv("KVPLUG_WIRE", "vllm")
