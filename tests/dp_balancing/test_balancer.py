"""How a balancer gets ready, and what it says in the engine's log."""

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvplug.dp_balancing import balancer as module
from kvplug.dp_balancing import private_streams
from kvplug.dp_balancing.balancer import Balancer, Request
from kvplug.dp_balancing.rank_streams import RankStream
from tests.plain_kernels import with_plain_kernels
from tests.plugins.stock_client import wait_until

DOCUMENT = list(range(100, 180))


def asked():
    return Request("r", len(DOCUMENT), DOCUMENT)


def test_it_chooses_once_its_streams_are_connected(ranks, log, monkeypatch):
    monkeypatch.setattr("kvplug.dp_balancing.warming.warm_up", lambda: None)
    balancer = Balancer("vLLM", ranks.streams, logging.getLogger("engine"))
    assert balancer.choose(asked, 2) is None
    assert balancer.num_left == {module.NOT_READY: 1}
    balancer.start()
    wait_until(lambda: balancer.is_ready, "it is ready")
    assert balancer.choose(asked, 2) in (0, 1)
    assert "events of 2 of 2 ranks arrive" in log.text
    assert "balances its data-parallel ranks itself" not in log.text  # a start is no fault
    balancer.stop()
    assert balancer.choose(asked, 2) is None


def test_a_stream_that_cannot_be_is_named(log, monkeypatch):
    monkeypatch.setattr("kvplug.dp_balancing.warming.warm_up", lambda: None)
    stream = RankStream(engine_rank=0, events="carrier-pigeon://x")
    balancer = Balancer("vLLM", [stream], logging.getLogger("engine"))
    balancer.start()
    wait_until(lambda: balancer.num_left, "it has failed")
    assert balancer.choose(asked, 1) is None
    assert "vLLM balances its data-parallel ranks itself: TransportError" in log.text


def test_it_tells_now_and_then_what_it_did(balancer, log):
    assert balancer.choose(asked, 2) is not None
    balancer._summary_at_s = 0.0
    balancer.note(lambda chooser: chooser.router.finish("r"))
    balancer.choose(lambda: Request("q", 5), 2)
    assert "chose the rank of 2 requests (1 by load alone)" in log.text
    assert "left to vLLM: none" in log.text


def test_a_note_that_fails_does_not_raise(balancer, log):
    assert balancer.note(lambda chooser: chooser.router.finish(None)) is None
    assert balancer.num_left.total() == 1


def test_private_streams_are_for_this_user_and_gone_with_the_process():
    program = "from kvplug.dp_balancing import private_streams as p; print(p.private_streams())"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    folder = Path(run.stdout.split("ipc://")[1].split("/events")[0])
    assert folder.name.startswith("kvplug-")
    assert not folder.exists()


def test_private_streams_fit_into_a_sockets_path(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = Path(private_streams._new_folder())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(f"{folder}/answers_dp128_answers") < 107
    private_streams._remove(str(folder), os.getpid() + 1)
    assert folder.exists()  # it is another process's to remove
    private_streams._remove(str(folder), os.getpid())
    assert not folder.exists()


@pytest.mark.slow
def test_warming_routes_a_request():
    command = [sys.executable, "-m", "kvplug.dp_balancing.warming"]
    subprocess.run(command, check=True, env=with_plain_kernels(), timeout=60)
