"""`make fuzz-service` in small."""

import pytest

from tests.fuzz.service import fuzz


@pytest.mark.slow
def test_no_request_is_answered_with_500(capsys):
    assert fuzz(num_examples=15, first_seed=1) == []
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) > 20
    [completions] = [row for row in rows if row.startswith("POST /v1/completions ")]
    assert "200:" in completions
