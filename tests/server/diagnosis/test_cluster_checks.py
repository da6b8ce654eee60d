"""What is found wrong between routers."""

import pytest

from kvplug.cluster.parts import Part
from kvplug.cluster.replica_status import Lag, ReplicaStatus
from kvplug.server.diagnosis.cluster_checks import check_replica
from kvplug.server.diagnosis.finding import CLUSTER, Code


def found(**status):
    status = {"router_id": "a", "is_connected": True} | status
    findings = check_replica(ReplicaStatus(**status))
    assert all(each.worker == CLUSTER and each.fix for each in findings)
    return [(each.code, each.seen) for each in findings]


def test_nothing_is_found_of_one_that_is_well():
    assert found(lag_messages=5, lag_s=9.0) == []


@pytest.mark.parametrize(
    ("part", "code"),
    [
        (Part.STREAM, Code.NATS_STREAM),
        (Part.CONSUMER, Code.NATS_STREAM),
        (Part.SNAPSHOT, Code.SNAPSHOT_FAILED),
        (Part.RESTORE, Code.SNAPSHOT_UNUSABLE),
    ],
)
def test_each_part_has_a_finding(part, code):
    assert found(problems={part: "why"}) == [(code, "why")]


def test_without_a_server_nothing_else_is_said_of_it():
    problems = {Part.CONNECTION: "no connection to a", Part.STREAM: "x", Part.SNAPSHOT: "y"}
    away = found(is_connected=False, problems=problems, lag_s=99.0)
    assert away == [(Code.NATS_AWAY, "no connection to a")]


def test_what_the_server_refuses_is_named():
    refused = ("publish kvplug.f.mark", *("subscription to x",) * 9)
    [(code, seen)] = found(refused=refused)
    assert code == Code.NATS_REFUSED
    assert seen.startswith("refused: publish kvplug.f.mark, subscription")


def test_lag_and_a_second_router_of_one_id():
    [(behind, seen), (double, _)] = found(lag_messages=7, lag_s=12.3, is_double=True)
    assert (behind, double) == (Code.BEHIND, Code.ROUTER_ID)
    assert seen == "7 messages that are not applied, for 12 s"


def test_lag_is_counted_from_when_it_began():
    now = [0.0]
    lag = Lag(lambda: now[0])
    assert lag.lag_s(0) == 0
    for second, last_seq in ((1, 10), (2, 20), (3, 20)):
        now[0] = float(second)
        lag.note(last_seq)
    assert [lag.lag_s(seq) for seq in (0, 10, 19, 20)] == [2.0, 1.0, 1.0, 0.0]
    lag.note(5)
    assert (lag.lag_s(4), lag.lag_s(5)) == (0.0, 0.0)
