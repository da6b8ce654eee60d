"""Ranks that publish, and who chooses among them."""

import logging

import pytest

from kvplug.dp_balancing.balancer import Balancer
from kvplug.dp_balancing.chooser import Chooser
from tests.dp_balancing.ranks import Ranks
from tests.plugins.conftest import key_files as key_files
from tests.plugins.stock_client import wait_until


@pytest.fixture
def ranks(tmp_path):
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.stop()


@pytest.fixture
def chooser(ranks):
    chooser = Chooser(ranks.streams)
    chooser.start()
    wait_until(lambda: chooser.num_connected == 2, "both are connected")
    yield chooser
    chooser.stop()


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture
def balancer(chooser):
    """One that is ready, without the compilation."""
    balancer = Balancer("vLLM", (), logging.getLogger("engine"))
    balancer._chooser = chooser
    return balancer
