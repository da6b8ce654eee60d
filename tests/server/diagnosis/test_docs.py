"""docs/troubleshooting.md has every code, and no other."""

import re
from pathlib import Path

from kvplug.server.diagnosis.finding import Code

PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"


def test_the_table_of_codes_is_complete():
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("## The codes\n")
    rows = re.findall(r"^\| `(\w+)` \|", rest.partition("\n## ")[0], re.MULTILINE)
    assert sorted(rows) == sorted(code.value for code in Code)
