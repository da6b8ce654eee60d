"""Ports, and the command lines of the processes around them; no engine is started."""

import json
import socket
from pathlib import Path

import pytest

from examples.launch import ports
from examples.launch.endpoint import Endpoint
from examples.launch.errors import LaunchError
from examples.launch.ports import free_ports
from examples.launch.router_process import RouterProcess
from examples.launch.vllm_server import VllmServer, VllmSettings


def make_server(tmp_path, **settings):
    paths = {"python": Path("/engine/python"), "model_dir": Path("/models/tiny")}
    return VllmServer("vllm-0", VllmSettings(**{**paths, **settings}), log_dir=tmp_path)


def flag(command, name):
    return command[command.index(name) + 1]


def test_free_ports_differ_and_are_not_for_outgoing_connections():
    given = free_ports(20)
    of_ranks = {port + rank for port in given for rank in range(ports.MAX_RANKS)}
    assert len(of_ranks) == 20 * ports.MAX_RANKS
    assert max(of_ranks) < max(int(ports.OUTGOING_RANGE.read_text().split()[0]), 30_000)
    assert of_ranks.isdisjoint(ports.SGLANG_PORTS)


def until_none_is_left():
    while True:
        try:
            yield from free_ports(1)
        except LaunchError:
            return


def test_a_port_is_not_free_if_that_of_a_rank_is_taken(monkeypatch):
    monkeypatch.setattr(ports, "_given_away", set())
    (port,) = free_ports(1)
    ports._given_away.clear()
    monkeypatch.setattr(ports, "FIRST_PORT", port - 20)
    monkeypatch.setattr(ports, "_first_outgoing_port", lambda: port + 40)
    with socket.socket() as holder:
        holder.bind(("", port + 1))
        given = list(until_none_is_left())
    assert given
    assert not any(port + 1 in range(each, each + ports.MAX_RANKS) for each in given)


def test_events_are_bound_and_replayable(tmp_path):
    server = make_server(tmp_path)
    config = json.loads(flag(server._command(), "--kv-events-config"))
    assert config["endpoint"].startswith("tcp://*:")
    assert server.events_endpoint == config["endpoint"].replace("*", "127.0.0.1")
    assert server.replay_endpoint == config["replay_endpoint"].replace("*", "127.0.0.1")
    assert config["topic"] == "kv@vllm-0@tiny-llama"


def test_settings_and_extras_reach_the_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    server = make_server(
        tmp_path, num_gpu_blocks=99, extra_flags=("--seed", "5"), extra_env={"OMP_NUM_THREADS": "2"}
    )
    command, env = server._command(), server._env()
    assert flag(command, "--num-gpu-blocks-override") == "99"
    assert command[-2:] == ["--seed", "5"]
    assert env["OMP_NUM_THREADS"] == "2"
    assert "PYTHONPATH" not in env


def test_a_server_that_cannot_start_names_its_log(tmp_path):
    server = make_server(tmp_path, python=Path("/no/such/python"))
    server.start()
    try:
        with pytest.raises(LaunchError, match=r"vllm-0 ended with status 127 .*vllm-0\.log"):
            server.wait_ready(timeout_s=20)
    finally:
        server.stop()


def test_the_router_gets_every_worker(tmp_path):
    servers = [make_server(tmp_path), make_server(tmp_path)]
    router = RouterProcess(
        "kv", servers, model_dir=tmp_path, log_dir=tmp_path, extra_flags=("--x", "y")
    )
    workers = [part for part in router._process._command if part.startswith("--worker=")]
    assert workers == [f"--worker={s.url},events={s.events_endpoint}" for s in servers]
    assert router._process._command[-2:] == ["--x", "y"]


def test_nobody_is_not_healthy():
    (port,) = free_ports(1)
    assert not Endpoint(port).is_healthy()
