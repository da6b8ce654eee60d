"""docs/troubleshooting.md has every code, and no other."""

import re
from pathlib import Path

from kvplug.server.diagnosis.finding import Code

PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"


def test_the_table_of_codes_is_complete():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(code.value for code in Code)
