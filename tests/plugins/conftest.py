"""The tests of the stock format choose it; those of our own wire leave what is the default."""

import pytest
import zmq.auth


@pytest.fixture
def stock_wire(monkeypatch):
    """What the plug-ins publish is vLLM's format."""
    monkeypatch.setenv("KVPLUG_WIRE", "vllm")


@pytest.fixture
def key_files(tmp_path):
    """The publisher's secret key, a client's, and a folder that allows it."""
    for name in ("server", "client", "stranger"):
        zmq.auth.create_certificates(tmp_path, name)
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "client.key").write_text((tmp_path / "client.key").read_text())
    for secret in tmp_path.glob("*.key_secret"):
        secret.chmod(0o600)
    return tmp_path
