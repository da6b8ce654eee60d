"""How the doctor prints event streams."""

from kvplug.protocol import WorkerHello
from kvplug.server.diagnosis.streams import RankHealth, StreamHealth, WorkerHealth, lines_of

HELLO = WorkerHello(engine="vllm", engine_version="0.32.0", capacity_blocks=640, block_size=32)


def test_a_line_for_each_rank_says_whose_messages_come():
    workers = [
        WorkerHealth(
            "http://a:1",
            [
                RankHealth(0, StreamHealth("exact", "kvplug 1", HELLO)),
                RankHealth(1, StreamHealth("blind")),
            ],
        ),
        WorkerHealth("tcp://b:5557", [RankHealth(0, StreamHealth("stale", "stock"))]),
        WorkerHealth("http://c:1", [RankHealth(0)]),
    ]
    assert list(lines_of(workers)) == [
        "event streams",
        "  http://a:1     kvplug 1   exact   vllm 0.32.0, 640 blocks of 32",
        "  http://a:1#1   silent     blind",
        "  tcp://b:5557   stock      stale",
        "  http://c:1     none",
    ]
