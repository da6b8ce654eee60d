"""`make bench-tokenize`, one round of one family."""

import json

import pytest

from tests.benchmarks import tokenize
from tests.tokenization.families import NotFetchedError, family_folder


@pytest.mark.slow
def test_a_round_measures_what_the_documentation_names(tmp_path):
    try:
        family_folder("llama2")
    except NotFetchedError as error:
        pytest.skip(str(error))
    out = tmp_path / "tokenize.json"
    tokenize.main(["--only", "llama2", "--rounds", "1", "--out", str(out)])
    row = json.loads(out.read_text())["llama2"]
    assert {"tokenizers_100k", "first_100k", "next_100k", "next_24k", "pause_next"} <= row.keys()
    assert row["next_100k"] < row["tokenizers_100k"]
