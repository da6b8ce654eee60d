"""Files as workloads: who shares what, and one sentence for lines that cannot be."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from kvplug.errors import ConfigError
from kvplug.sim.replay.traces import LogWindow, kind_of, read


def write_jsonl(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line(timestamp, input_length, output_length=1, **more):
    return {
        "timestamp": timestamp, "input_length": input_length, "output_length": output_length, **more
    }  # fmt: skip


def num_shared(one, other):
    both = zip(one.blocks.tolist(), other.blocks.tolist(), strict=False)
    return next(
        (n for n, (a, b) in enumerate(both) if a != b), min(map(len, (one.blocks, other.blocks)))
    )


@pytest.fixture
def mooncake(tmp_path):
    return write_jsonl(
        tmp_path / "trace.jsonl",
        [
            line(1000, 1300, 600, hash_ids=[0, 1, 2]),
            line(4000, 1536, 2, hash_ids=[0, 1, 3]),
            line(2500, 300, 1, hash_ids=[9]),
        ],
    )


def test_a_mooncake_trace_has_blocks_of_512_and_milliseconds(mooncake):
    assert kind_of(mooncake) == "mooncake"
    first, short, second = read(mooncake, "mooncake", 512).requests
    assert [r.arrival_s for r in (first, short, second)] == [0.0, 1.5, 3.0]
    # 1300 tokens are two full blocks; 600 more make a third, 1900, of the answer.
    assert [len(r.blocks) for r in (first, short, second)] == [2, 0, 3]
    assert [len(r.answer_blocks) for r in (first, short, second)] == [1, 0, 0]
    assert (first.num_tokens, first.num_answer_tokens) == (1300, 600)
    assert num_shared(first, second) == 2


def test_a_mooncake_trace_in_smaller_blocks_shares_as_many_tokens(mooncake):
    first, short, second = read(mooncake, "mooncake", 16).requests
    assert [len(r.blocks) for r in (first, short, second)] == [81, 18, 96]
    assert num_shared(first, second) == 64
    with pytest.raises(ConfigError, match="divisor, got 500"):
        read(mooncake, "mooncake", 500)


def test_a_log_with_hash_ids_has_one_per_block_and_seconds(tmp_path):
    path = write_jsonl(
        tmp_path / "log.jsonl",
        [line(7.5, 40, hash_ids=[1, 2]), line(8.0, 40, hash_ids=[1, 5, 6])],
    )
    first, second = read(path, "log", 16).requests
    assert second.arrival_s == 0.5
    assert (len(first.blocks), len(second.blocks), num_shared(first, second)) == (2, 2, 1)


def test_a_turn_of_a_session_begins_with_the_turn_before_and_its_answer(tmp_path):
    path = write_jsonl(
        tmp_path / "log.jsonl",
        [
            line(0, 100, 60, session="a"),
            line(1, 100, 60, session="b"),
            line(2, 300, 10, session="a"),
            line(3, 200, 10, session="a"),
        ],
    )
    first, other, second, anew = read(path, "log", 16).requests
    held = [*first.blocks.tolist(), *first.answer_blocks.tolist()]
    assert len(held) == 10
    assert second.blocks.tolist()[:10] == held
    assert num_shared(first, other) == num_shared(second, anew) == 0


def test_a_named_prefix_is_shared_as_far_as_it_is_said_to_go(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(
        "timestamp,input_length,output_length,prefix,prefix_length,user\n"
        "0.0,200,5,system,64,x\n"
        "0.1,200,5,system,100,y\n"
        "0.2,200,5,system,100,\n"
        "0.3,200,5,,,z\n"
    )
    assert kind_of(path) == "log"
    short, long, again, alone = read(path, "log", 16).requests
    assert num_shared(short, long) == 4
    assert num_shared(long, again) == 6
    assert num_shared(long, alone) == 0


def test_csv_and_json_lines_say_the_same(tmp_path):
    fields = [(0.0, 40, 3, [1, 2, 3]), (0.25, 48, 1, [1, 2, 4])]
    table = tmp_path / "log.csv"
    rows = [f"{t},{i},{o},{' '.join(map(str, ids))}" for t, i, o, ids in fields]
    table.write_text("\n".join(["timestamp,input_length,output_length,hash_ids", *rows]))
    lines = write_jsonl(
        tmp_path / "log.jsonl", [line(t, i, o, hash_ids=ids) for t, i, o, ids in fields]
    )
    for one, other in zip(*(read(p, "log", 16).requests for p in (table, lines)), strict=True):
        assert one.blocks.tolist() == other.blocks.tolist()
        assert one.arrival_s == other.arrival_s
        assert one.num_answer_tokens == other.num_answer_tokens


def test_a_window_is_requests_in_a_row_from_0_s(tmp_path):
    path = write_jsonl(tmp_path / "log.jsonl", [line(n * n, 20 + n) for n in range(100)])
    window = LogWindow(path=path, kind="log", block_size=16, num_requests=10)
    firsts = set()
    for seed in range(8):
        requests = window.make(seed).requests
        first = requests[0].num_tokens - 20
        assert [r.num_tokens - 20 for r in requests] == list(range(first, first + 10))
        assert [r.arrival_s for r in requests] == [
            n * n - first * first for n in range(first, first + 10)
        ]
        firsts.add(first)
    assert len(firsts) > 4
    assert window.make(3).requests[0].num_tokens == window.make(3).requests[0].num_tokens
    whole = LogWindow(path=path, kind="log", block_size=16)
    assert len(whole.make(0).requests) == 100


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "empty file"),
        ([line(0, 5), line(0, 0)], r"line 2: .*>= 1.*input_length"),
        ([line(0, 5), {"timestamp": 1}], r"line 2: .*input_length"),
        ([line(0, 10**11)], r"line 1: .*<= 10000000.*input_length"),
        ([line("noon", 5)], r"line 1: .*timestamp"),
        ([line(0, 40, hash_ids=[1])], r"expected 3 hash_ids for 40 tokens in blocks of 16, got 1"),
        ([line(0, 40, hash_ids=[])], r"expected 3 hash_ids"),
        ([line(0, 40, session="a", prefix="b", prefix_length=1)], "got session and prefix"),
        ([line(0, 40, prefix="b", prefix_length=41)], r"in \[1, 40\].*got 41"),
        ([line(0, 40, prefix="b")], r"in \[1, 40\].*got None"),
        ([line(0, 40, prefix_length=4)], "prefix_length needs a prefix"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, lines, message):
    path = write_jsonl(tmp_path / "log.jsonl", lines)
    with pytest.raises(ConfigError, match=message) as caught:
        read(path, "log", 16)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("nan,40,1", "line 3: timestamp must be finite"),
        ("0,many,1", "line 3: .*int.*input_length"),
        ("0,40", "line 3: .*output_length"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, row, message):
    path = tmp_path / "log.csv"
    path.write_text(f"timestamp,input_length,output_length\n0,40,1\n{row}\n")
    with pytest.raises(ConfigError, match=message):
        read(path, "log", 16)


def test_a_file_that_is_none_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        kind_of(tmp_path / "none.jsonl")
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read(path, "log", 16)
    path.write_text("{oops\n")
    with pytest.raises(ConfigError, match="line 1"):
        read(path, "mooncake", 512)


def test_the_page_says_how_to_log_what_prompts_share(tmp_path):
    page = Path(__file__).parents[3] / "docs" / "simulation.md"
    [code] = re.findall(r"^   ```python\n(.*?)   ```", page.read_text(), re.DOTALL | re.MULTILINE)
    names = {}
    exec(compile(textwrap.dedent(code), page.name, "exec"), names)
    prompts = [list(range(40)), [*range(32), 7, 8, 9]]
    lines = [names["line_of"](0.5 * i, p, {"completion_tokens": 4}) for i, p in enumerate(prompts)]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines))
    one, other = read(path, "log", 16).requests
    assert (one.num_tokens, one.num_answer_tokens, other.arrival_s) == (40, 4, 0.5)
    assert num_shared(one, other) == 2
