"""`python -m kvplug.sim`: a table, JSON, a plot; one sentence and exit code 2 for wrong input."""

import json
import subprocess
import sys

import pytest

from kvplug.sim.replay.cli import main
from tests.plain_kernels import with_plain_kernels
from tests.sim.replay.test_traces import line, write_jsonl

FAST = ["--processes", "1", "--seeds", "2", "--requests", "40", "--policies", "random,least_loaded"]


def exit_code(argv):
    try:
        return main(argv)
    except SystemExit as left:
        return left.code


@pytest.fixture
def log(tmp_path):
    lines = [line(n * 0.02, 300 + n, 5, prefix=f"p{n % 4}", prefix_length=256) for n in range(60)]
    return str(write_jsonl(tmp_path / "log.jsonl", lines))


@pytest.fixture
def trace(tmp_path):
    lines = [line(n * 20, 1100 + n, 5, hash_ids=[n % 4, 4 + n % 4, 99]) for n in range(60)]
    return str(write_jsonl(tmp_path / "trace.jsonl", lines))


def rows_of(text):
    table = [row for row in text.splitlines() if row.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_a_policy_is_a_row_of_the_table(log, capsys):
    assert main([log, *FAST]) == 0
    text = capsys.readouterr().out
    assert "log log.jsonl: 60 requests in 1 s, blocks of 16 tokens" in text
    assert "2 random windows of 40 requests" in text
    first, second = rows_of(text)
    assert (first["policy"], second["policy"]) == ("random", "least_loaded")
    assert first["TTFT mean against random, ms"] == ""
    assert "±" in second["TTFT mean against random, ms"]
    assert float(first["imbalance"]) > 1


def test_json_has_every_seed_and_the_table_its_means(log, tmp_path, capsys):
    path = tmp_path / "study.json"
    assert main([log, *FAST, "--clients", "4", "--json", str(path)]) == 0
    study = json.loads(path.read_text())
    assert study["arrivals"]["clients"] == 4
    assert len(study["fleet"]) == 4
    for row in rows_of(capsys.readouterr().out):
        policy = study["policies"][row["policy"]]
        seeds = [seed["ttft_mean_ms"] for seed in policy["seeds"]]
        assert policy["mean"]["ttft_mean_ms"] == pytest.approx(sum(seeds) / 2)
        assert row["TTFT mean, ms"] == f"{policy['mean']['ttft_mean_ms']:,.1f}"
    ours, theirs = (study["policies"][name]["seeds"] for name in ("least_loaded", "random"))
    gains = [
        one["ttft_p99_ms"] - other["ttft_p99_ms"] for one, other in zip(ours, theirs, strict=True)
    ]
    difference, half_width = study["policies"]["least_loaded"]["against_first"]["ttft_p99_ms"]
    assert difference == pytest.approx(sum(gains) / 2)
    assert half_width == pytest.approx(12.7062 * abs(gains[0] - gains[1]) / 2, rel=1e-4)


@pytest.mark.slow
def test_a_plot_is_drawn(log, tmp_path):
    path = tmp_path / "study.png"
    assert main([log, *FAST, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_rejected_before_the_work(log, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([log, *FAST, "--plot", "study.png"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "kvplug.sim: a plot needs matplotlib: pip install 'kvplug[sim]'\n"


def test_a_mooncake_trace_is_run_in_blocks_of_512(trace, tmp_path, capsys):
    path = tmp_path / "study.json"
    assert main([trace, *FAST, "--cache-tokens", "20480", "--json", str(path)]) == 0
    assert (
        "Mooncake trace trace.jsonl: 60 requests in 1 s, blocks of 512" in capsys.readouterr().out
    )
    fleet = json.loads(path.read_text())["fleet"]
    assert [(spec["block_size"], spec["num_blocks"]) for spec in fleet] == [(512, 40)] * 4


def test_a_fleet_of_a_file_differs_from_the_flags_where_it_says_so(log, tmp_path):
    fleet, path = tmp_path / "fleet.json", tmp_path / "study.json"
    fleet.write_text(json.dumps([{"cache_tokens": 3200}, {"prefill_tokens_per_s": 5000}]))
    flags = ["--fleet", str(fleet), "--blocks", "900", "--json", str(path)]
    assert main([log, *FAST, *flags]) == 0
    small, slow = json.loads(path.read_text())["fleet"]
    assert (small["num_blocks"], small["time_model"]["prefill_tokens_per_s"]) == (200, 20_000)
    assert (slow["num_blocks"], slow["time_model"]["prefill_tokens_per_s"]) == (900, 5000)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policies", "random,best"], "policy 'best': expected one of kv"),
        (["--blocks", "4"], "the smallest cache has 4"),
        (["--blocks", "0"], "blocks"),
        (["--blocks", "9", "--cache-tokens", "900"], "got both"),
        (["--cache-tokens", "15"], "at least one block of 16, got 15"),
        (["--prefill-tokens-per-s", "0"], "prefill_tokens_per_s must be above 0"),
        (["--engines", "0"], "--engines: expected a whole number of at least 1, got '0'"),
        (["--rate", "-1"], "--rate: expected a number above 0, got '-1'"),
        (["--warm", "1"], "--warm: expected a number of at least 0 and less than 1, got '1'"),
        (["--rate", "1", "--clients", "1"], "not allowed with"),
        (["--fleet", "none.json"], "cannot read none.json: No such file"),
        (["--json", "none/study.json"], "expected a file in a folder that exists"),
        (["--plot", "study.doc"], "expected a name that ends in .png"),
        (["--format", "mooncake"], "line 1: expected hash_ids"),
    ],
)
def test_wrong_flags_get_one_sentence_and_code_2(log, capsys, flags, message):
    assert exit_code([log, *FAST, *flags]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_as_a_process_it_uses_processes_and_prints_no_bar_into_a_file(log):
    command = [sys.executable, "-m", "kvplug.sim", log, *FAST, "--processes", "2"]
    environment = with_plain_kernels()
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert [row["policy"] for row in rows_of(run.stdout)] == ["random", "least_loaded"]
    assert run.stderr == ""
