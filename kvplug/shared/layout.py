"""The files of a shared folder, and where things are in them.

In:  numbers of processes.   Out: names of files, and their sizes in words of 8 bytes.

    control     the version and the generation of the index (kernels/versioned.py)
    page.N      which arrays generation N has (kvplug/shared/pages.py)
    names       of ranks, by slot
    load        of each process, by slot: what ranks are busy with because of it; then a line of
                each process: how often it has changed that, and when it last routed a request
    news.N      a ring of process N: what it has sent where
    writer.lock locked by the writer as long as it lives
"""

from __future__ import annotations

from typing import Final

from kvplug.kernels.peer_load import ROW_WIDTH

CONTROL: Final = "control"
NAMES: Final = "names"
LOAD: Final = "load"
WRITER_LOCK: Final = "writer.lock"

NUM_SLOTS: Final = 4096
"""Of ranks; a slot stays with its rank."""
LINE_WIDTH: Final = 8
NEWS_WORDS: Final = 2**18
"""2 MiB for each process: 40 prompts of 100,000 tokens in blocks of 16."""

ROWS_WORDS: Final = NUM_SLOTS * ROW_WIDTH


def page_name(generation: int) -> str:
    """The file that says which arrays a generation has."""
    return f"page.{generation}"


def news_name(process: int) -> str:
    """The ring of a process."""
    return f"news.{process}"


def load_words(num_processes: int) -> int:
    """Words of `load`."""
    return num_processes * (ROWS_WORDS + LINE_WIDTH)


def rows_at(process: int) -> int:
    """The word of `load` where the rows of a process begin."""
    return process * ROWS_WORDS


def line_at(process: int, num_processes: int) -> int:
    """The word of `load` where the line of a process begins."""
    return num_processes * ROWS_WORDS + process * LINE_WIDTH
