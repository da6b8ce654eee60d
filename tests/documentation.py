"""The pages of the documentation, and what is in them.

In:  README.md, docs/, examples/README.md, CHANGELOG.md.   Out: blocks, commands, links, anchors.
"""

import re
import shlex
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(language, pages=PAGES):
    """(page, number, code) of every block in the language."""
    for page in pages:
        for number, [_, found, code] in enumerate(_BLOCK.findall(page.read_text()), 1):
            if found == language:
                yield page, number, textwrap.dedent(code)


def prose_of(page):
    """The page without its blocks."""
    return _BLOCK.sub("", page.read_text())


def commands(code):
    """The words of each command in a bash block: one line, or more with quotes or backslashes."""
    waiting = ""
    for line in code.replace("\\\n", " ").splitlines():
        waiting = f"{waiting}\n{line}" if waiting else line
        try:
            words = shlex.split(waiting, comments=True)
        except ValueError:  # a quote is open
            continue
        waiting = ""
        yield from _parts(words)
    assert not waiting, f"a quote is never closed: {waiting}"


def _parts(words):
    part = []
    for word in [*words, "|"]:
        if word in ("|", "&", "&&"):
            if part:
                yield part
            part = []
        else:
            part.append(word)


def links(page):
    """Targets of links and pictures within the repository."""
    text = re.sub(r"`[^`\n]*`", "", prose_of(page))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def anchors(page):
    """As GitHub makes them of the headings."""
    seen = {}
    for heading in re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        count = seen[anchor] = seen.get(anchor, -1) + 1
        yield f"{anchor}-{count}" if count else anchor
