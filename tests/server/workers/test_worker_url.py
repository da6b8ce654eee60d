"""Where the API of a worker is that was named by its event endpoint."""

import pytest

from kvplug.protocol import WorkerHello
from kvplug.server.workers.worker_url import url_said

ENDPOINT = "tcp://10.0.0.7:5557"


def said(url, endpoint=ENDPOINT):
    return url_said(WorkerHello(url=url), endpoint, has_spoken=True)


@pytest.mark.parametrize(
    ("url", "endpoint", "expected"),
    [
        ("http://10.0.0.7:8000/", ENDPOINT, "http://10.0.0.7:8000"),
        ("https://gateway/engine-0/", ENDPOINT, "https://gateway/engine-0"),
        ("http://127.0.0.1:8000", "tcp://127.0.0.1:5557", "http://127.0.0.1:8000"),
        ("http://localhost:8000", "ipc:///run/events", "http://localhost:8000"),
        # Bound to all addresses: the endpoint says by which one it is reached.
        ("http://0.0.0.0:8000", ENDPOINT, "http://10.0.0.7:8000"),
        ("http://*:8000", ENDPOINT, "http://10.0.0.7:8000"),
        ("http://[::]:8000/base", "tcp://[fe80::1]:5557", "http://[fe80::1]:8000/base"),
        ("http://0.0.0.0", "ipc:///run/events", "http://127.0.0.1"),
    ],
)
def test_a_hello_says_where_the_api_is(url, endpoint, expected):
    assert said(url, endpoint) == expected


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", "does not say where its API is; set KVPLUG_WORKER_URL"),
        ("10.0.0.7:8000", "no http URL; set KVPLUG_WORKER_URL"),
        ("http://", "no http URL"),
        ("http://h:0", "no http URL"),
        ("http://h:99999", "no http URL"),
        ("http://h:1/a b", "no http URL"),
        ("http://h:1/a\r\nb", "no http URL"),
        ("http://127.0.0.1:8000", "only its machine reaches; set KVPLUG_WORKER_URL"),
    ],
)
def test_a_url_that_is_no_use_is_named_with_what_to_set(url, sentence):
    with pytest.raises(ValueError, match=sentence):
        said(url)


def test_a_password_in_a_url_is_not_repeated():
    with pytest.raises(ValueError, match="may hold a password; set KVPLUG") as rejected:
        said("http://me:secret@h:8000")
    assert "secret" not in str(rejected.value)


def test_without_a_hello_it_is_said_what_is_missing():
    with pytest.raises(ValueError, match="nothing has come from its event endpoint yet"):
        url_said(None, ENDPOINT, has_spoken=False)
    with pytest.raises(ValueError, match="a stock one"):
        url_said(None, ENDPOINT, has_spoken=True, is_ours=False)
    with pytest.raises(ValueError, match="the same release of kvplug"):
        url_said(None, ENDPOINT, has_spoken=True, is_ours=True)
