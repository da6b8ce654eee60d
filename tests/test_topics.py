import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.topics import Topic


@pytest.mark.parametrize(
    ("text", "topic"),
    [
        ("kv@pod-0@qwen", Topic("pod-0", "qwen")),
        ("kv@10.0.0.7:8000@Qwen/Qwen3-32B", Topic("10.0.0.7:8000", "Qwen/Qwen3-32B")),
        ("kv@pod@model@revision", Topic("pod", "model@revision")),
        ("kv@pod", Topic("pod", "")),
        ("kv@pod@", Topic("pod", "")),
        ("kv@@model", None),
        ("kv@", None),
        ("kv", None),
        ("", None),
        ("KV@pod@model", None),
        ("kv-events", None),
    ],
)
def test_parse(text, topic):
    assert Topic.parse(text) == topic


@given(st.text(min_size=1).filter(lambda pod: "@" not in pod), st.text())
def test_a_topic_is_what_it_prints(pod, model):
    topic = Topic(pod, model)
    assert Topic.parse(str(topic)) == topic
    assert str(topic).startswith(Topic(pod).subscription)


def test_the_subscription_to_one_pod_is_not_one_to_its_namesakes():
    assert not str(Topic("pod-10", "m")).startswith(Topic("pod-1").subscription)


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        (Topic("a", "m"), True),
        (Topic("a"), True),
        (Topic("a", "m-2"), False),
        (Topic("a2", "m"), False),
        (Topic("a2"), False),
    ],
)
def test_matches(wanted, matches):
    assert wanted.matches(Topic("a", "m")) is matches
