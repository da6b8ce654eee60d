"""`make bench-tokenize`: what the router adds to a request for its text.

usage: python -m tests.benchmarks.tokenize [--only FAMILY[,FAMILY]] [--rounds N]

A chat of 60 turns with 24,000 or 100,000 tokens comes for the first time, then with one turn more
(an answer of 400 words and a question of 40). Everything that the router does with it is timed, but
for HTTP: JSON, chat template, tokens, and the decision among 8 ranks. Beside it the time of the
tokenizer alone for the whole text, by `tokenizers` and by fastokens, on a text that it has not
seen. Tokenizers are those of real models. Each round has a chat of its own; medians in ms, and the
best round in brackets (`*_best`), as others may use the machine.

`pause_*`: the longest time that the event loop was held while a chat of 0.8 MB came in, at the
first and at the next turn, and while nothing came; it is looked at every 0.2 ms.

Without fastokens (`pip uninstall fastokens`) the same is measured with `tokenizers`. Prints a table
and writes bench-results/tokenize.json: {family: {metric: ms}}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from kvplug.kernels import compile_all
from kvplug.router.config import RouterConfig
from kvplug.router.core import Router
from kvplug.server.api.bodies import read_body
from kvplug.server.api.prompts import Prompts
from kvplug.server.service import SWITCH_S
from kvplug.tokenization.prompt_kind import PromptKind
from kvplug.tokenization.text_encoder import slow_encoder, text_encoder
from tests.benchmarks.sides import ROOT
from tests.tokenization.families import FAMILIES, NotFetchedError, family_folder

RESULTS = ROOT / "bench-results" / "tokenize.json"
NUM_TURNS, NUM_RANKS = 60, 8
LENGTHS = {"24k": 24_000, "100k": 100_000}
# Two of the packages have no template; theirs are longer, but write the same tokens.
TEMPLATES = {
    "gptoss": ("<|start|>", "<|message|>", "<|end|>"),
    "llama2": ("<s>[INST] ", " [/INST] ", " </s>"),
    "claude": ("<META_START>", "<META_END>", "<EOT>"),
}
WORDS = " ".join(topics[topic] for topic in sorted(topics)).split(" ")

Chat = list[dict[str, str]]


def chat_of(rng: random.Random, num_words: int) -> Chat:
    """NUM_TURNS pairs of a question and an answer, and a question."""
    per_turn = num_words // NUM_TURNS
    turns = [
        said(rng, role, per_turn * share // 10)
        for role, share in (("user", 2), ("assistant", 8))
        for _ in range(NUM_TURNS)
    ]
    pairs = [
        turn for pair in zip(turns[:NUM_TURNS], turns[NUM_TURNS:], strict=True) for turn in pair
    ]
    return [*pairs, said(rng, "user", 40)]


def said(rng: random.Random, role: str, num_words: int) -> dict[str, str]:
    """Words that follow each other somewhere; a number makes the text a new one."""
    start = rng.randrange(len(WORDS) - num_words)
    text = " ".join(WORDS[start : start + num_words])
    return {"role": role, "content": f"{rng.randrange(10**6)} {text}"}


def one_turn_more(rng: random.Random, chat: Chat) -> Chat:
    """The chat as its client sends it next."""
    return [*chat, said(rng, "assistant", 400), said(rng, "user", 40)]


class Family:
    """A served model, without HTTP."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.prompts = Prompts({"": folder})
        self.router = Router(RouterConfig(block_size=16))
        for rank in range(NUM_RANKS):
            self.router.add_worker(f"w{rank}")
        self.tokenizer = self.prompts.tokenizer_of(name, "")
        assert self.tokenizer is not None
        self._name = name

    def body_of(self, chat: Chat) -> bytes:
        """As its client sends it."""
        return msgspec.json.encode({"model": self._name, "messages": chat})

    async def added_ms(self, raw: bytes) -> float:
        """From the bytes of a body to the worker."""
        begin = time.perf_counter()
        body = await read_body(raw)
        prompt, _ = await self.prompts.tokens_of(body, "", kind=PromptKind.CHAT, size=len(raw))
        assert prompt is not None
        self.router.route(prompt.ids, request_id=f"r{time.perf_counter_ns()}")
        return (time.perf_counter() - begin) * 1000

    def num_words(self, num_tokens: int) -> int:
        """How many words have so many tokens."""
        sample = " ".join(WORDS[:20_000])
        return int(num_tokens * 20_000 / len(self.backend.encode(sample).ids))

    @property
    def backend(self) -> Tokenizer:
        """As it was configured."""
        assert self.tokenizer is not None
        return self.tokenizer._backend

    def text_of(self, chat: Chat) -> str:
        """The rendered chat."""
        assert self.tokenizer is not None
        return self.tokenizer._chat_text({"messages": chat})[0]


def timed_ms(call: Callable[[], Any]) -> float:
    """Once."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1000


async def longest_pause_ms(work: Callable[[], Any]) -> float:
    """How late the event loop was at worst while the work was done."""
    longest, running = 0.0, True

    async def look() -> None:
        nonlocal longest
        while running:
            begin = time.perf_counter()
            await asyncio.sleep(0.0002)
            longest = max(longest, time.perf_counter() - begin - 0.0002)

    looking = asyncio.create_task(look())
    await asyncio.sleep(0.05)
    longest = 0.0
    await work()
    running = False
    await looking
    return longest * 1000


async def measure(name: str, folder: Path, num_rounds: int) -> dict[str, float]:
    """All metrics of a family."""
    family = Family(name, folder)
    assert family.tokenizer is not None
    slow, (fast, library) = slow_encoder(family.backend), text_encoder(family.backend)
    found: dict[str, list[float]] = {}

    def note(metric: str, value: float) -> None:
        found.setdefault(metric, []).append(value)

    for number in range(num_rounds + 1):
        rng = random.Random(number)
        for length, num_tokens in LENGTHS.items():
            chat = chat_of(rng, family.num_words(num_tokens))
            text = family.text_of(chat)
            note(f"tokenizers_{length}", timed_ms(lambda t=text: slow([t], with_special=False)))
            if library == "fastokens":
                unseen = family.text_of(chat_of(rng, family.num_words(num_tokens)))
                note(
                    f"fastokens_{length}", timed_ms(lambda t=unseen: fast([t], with_special=False))
                )
            note(f"render_{length}", timed_ms(lambda c=chat: family.text_of(c)))
            note(f"first_{length}", await family.added_ms(family.body_of(chat)))
            note(f"next_{length}", await family.added_ms(family.body_of(one_turn_more(rng, chat))))
        big = chat_of(rng, 1_000_000 // 7)
        for turn, sent in (("first", big), ("next", one_turn_more(rng, big))):
            raw = family.body_of(sent)
            note(f"pause_{turn}", await longest_pause_ms(lambda r=raw: family.added_ms(r)))
        note("pause_idle", await longest_pause_ms(lambda: asyncio.sleep(0.03)))
    family.prompts.close()
    row = {}
    for metric, values in found.items():
        row[metric] = round(statistics.median(values[1:]), 2)  # the first round warms up
        row[f"{metric}_best"] = round(min(values[1:]), 2)
    return row


def with_template(name: str, scratch: Path) -> Path:
    """The folder of a family; one with a template if its package has none."""
    folder = family_folder(name)
    if name not in TEMPLATES:
        return folder
    begin, middle, end = TEMPLATES[name]
    template = "{% for m in messages %}" + begin + "{{ m.role }}" + middle + "{{ m.content }}" + end
    (scratch / name).mkdir()
    (scratch / name / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    text = json.dumps({"chat_template": template + "{% endfor %}"})
    (scratch / name / "tokenizer_config.json").write_text(text)
    return scratch / name


def table_of(results: dict[str, dict[str, float]]) -> Table:
    """A row for each family."""
    metrics = sorted({it for row in results.values() for it in row if not it.endswith("_best")})
    table = Table("family", *metrics)
    for name, row in results.items():
        cells = (f"{row[it]} ({row[f'{it}_best']})" if it in row else "-" for it in metrics)
        table.add_row(name, *cells)
    return table


def main(arguments: list[str]) -> dict[str, dict[str, float]]:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.tokenize")
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    console = Console(width=200, highlight=False)
    compile_all()
    sys.setswitchinterval(SWITCH_S)  # as the served router does
    results = {}
    with TemporaryDirectory() as scratch:
        for name in chosen.only.split(","):
            try:
                folder = with_template(name, Path(scratch))
            except NotFetchedError as error:
                console.print(f"skipped: {error}")
                continue
            results[name] = asyncio.run(measure(name, folder, chosen.rounds))
    console.print(table_of(results))
    chosen.out.parent.mkdir(exist_ok=True)
    chosen.out.write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
