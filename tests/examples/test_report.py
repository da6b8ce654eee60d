"""The numbers in the table."""

import io
import math

import pytest
from rich.console import Console

from examples.demo.client import Completed, Failed
from examples.demo.report import PolicyResult, percentile, print_report, sentence_on


def completed(ttft_ms, prompt_tokens, cached_tokens):
    return Completed(
        ttft_s=ttft_ms / 1e3, total_s=1.0, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens
    )


@pytest.fixture
def base():
    outcomes = [completed(ttft_ms, 100, 20) for ttft_ms in range(1, 10)]
    return PolicyResult("round_robin", [*outcomes, Failed("status 503")], wall_s=2.0)


@pytest.fixture
def better():
    return PolicyResult("kv", [completed(2, 300, 270), completed(4, 100, 50)], wall_s=0.5)


def test_shares_are_of_tokens_not_of_requests(base, better):
    assert base.cached_share == pytest.approx(0.2)
    assert better.cached_share == pytest.approx(320 / 400)


def test_failed_requests_count_nowhere_else(base):
    assert len(base.failed) == 1
    assert base.requests_per_s == pytest.approx(4.5)
    assert base.ttft_ms(50) == pytest.approx(5)
    assert base.ttft_ms(90) == pytest.approx(9)


def test_a_percentile_is_one_of_the_values():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([3.0, 1.0], 0) == 1.0
    assert percentile([3.0, 1.0], 100) == 3.0
    assert math.isnan(percentile([], 50))


def test_the_sentence_names_the_ratio(base, better):
    assert "80.0%" in sentence_on(base, better)
    assert "(4.00 times as many)" in sentence_on(base, better)
    assert "within 2 ms instead of 5 ms" in sentence_on(base, better)


def test_the_sentence_survives_an_empty_cache(better):
    nothing = PolicyResult("round_robin", [completed(1, 100, 0)], wall_s=1.0)
    assert "times as many" not in sentence_on(nothing, better)


def test_the_report_fits_a_terminal_and_names_a_failure(base, better):
    console = Console(file=io.StringIO(), width=80)
    print_report(console, [base, better])
    lines = console.file.getvalue().splitlines()
    header = next(line for line in lines if "policy" in line)
    assert "requests/s" in header
    row = next(line for line in lines if line.startswith("│ round_robin"))
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        *("round_robin", "10", "1", "20.0%", "5 ms", "9 ms", "4.5")
    ]
    assert "1 requests failed, the first one with: status 503" in lines[-1]


def test_all_failed_is_reported_too():
    console = Console(file=io.StringIO(), width=80)
    lost = PolicyResult("kv", [Failed("status 503")], wall_s=0.0)
    print_report(console, [lost, lost])
    assert "nan ms" in console.file.getvalue()
