"""Findings as text for a terminal.

In:  findings.   Out: lines; one block per finding, as fixes are sentences.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from kvplug.server.diagnosis.finding import Finding

_MAX_WIDTH = 110
_LABELS = ("expected", "seen", "fix")


def table_of(findings: Sequence[Finding]) -> str:
    """A heading per worker, a block per finding; a sentence if there are none."""
    if not findings:
        return "nothing found"
    width = min(shutil.get_terminal_size((_MAX_WIDTH, 24)).columns, _MAX_WIDTH)
    return "\n".join(_lines(findings, width))


def _lines(findings: Sequence[Finding], width: int) -> Iterator[str]:
    worker = None
    for finding in findings:
        if finding.worker != worker:
            worker = finding.worker
            yield worker
        yield f"  {finding.code}"
        for label in _LABELS:
            yield from textwrap.wrap(
                getattr(finding, label),
                width=width,
                initial_indent=f"    {label:<9} ",
                subsequent_indent=" " * 14,
                break_on_hyphens=False,
            )
