"""The workloads of `make bench-outcome`.

In:  a seed.   Out: requests in their order, and the fleet and the loads they are made for.

The engines' time is of the order of a large model on several GPUs: every step reads all weights,
whatever it computes. Engines, router and client share few cores here, and the slower the engines
are, the larger is the fleet's work beside Python's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvplug.sim.engine_config import TimeModel
from tests.benchmarks.outcome_requests import Ask, Message, Writer
from tests.benchmarks.outcome_traces import TraceSample

TIME_MODEL: Final = TimeModel(
    prefill_tokens_per_s=8_000.0,
    decode_base_s=0.002,
    decode_per_sequence_s=0.0002,
    step_overhead_s=0.02,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`clients` has one number per closed loop; the first `num_warm_up` answers do not count.

    `is_bound`: the caches cannot hold everything everywhere.
    """

    name: str
    num_engines: int
    cache_tokens: int
    clients: tuple[int, ...]
    num_warm_up: int
    is_bound: bool
    make: Callable[[int], list[Ask]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Questions about documents; lengths in tokens."""

    num_requests: int
    num_documents: int
    document: int
    own: int
    answer: int

    def __call__(self, seed: int) -> list[Ask]:
        """A document, drawn evenly, and words of its own."""
        writer = Writer(seed)
        documents = [writer.words(self.document) for _ in range(self.num_documents)]
        return [
            writer.completion(writer.random.choice(documents) + writer.words(self.own), self.answer)
            for _ in range(self.num_requests)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """`hot_share` of the prompts begin with the same words, the others have nothing in common."""

    num_requests: int
    prefix: int
    own: int
    answer: int
    hot_share: float

    def __call__(self, seed: int) -> list[Ask]:
        """The prefix, and words of its own."""
        writer = Writer(seed)
        hot = writer.words(self.prefix)
        return [
            writer.completion(
                (hot if writer.random.random() < self.hot_share else writer.words(self.prefix))
                + writer.words(self.own),
                self.answer,
            )
            for _ in range(self.num_requests)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unshared:
    """Prompts that have nothing in common, of evenly drawn lengths."""

    num_requests: int
    prompt: tuple[int, int]
    answer: int

    def __call__(self, seed: int) -> list[Ask]:
        """Words."""
        writer = Writer(seed)
        lengths = [writer.random.randint(*self.prompt) for _ in range(self.num_requests)]
        return [writer.completion(writer.words(length), self.answer) for length in lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Chats, `num_live` at a time, of `num_turns` turns; each has its next turn when `pause` others
    had theirs at the earliest, so that its last one has been answered.
    """

    num_requests: int
    num_live: int
    num_turns: int
    pause: int
    system: int
    turn: int
    answer: int

    def __call__(self, seed: int) -> list[Ask]:
        """The next turn of a random conversation, or the first one of a new conversation."""
        writer = Writer(seed)
        rules = {"role": "system", "content": writer.text(writer.words(self.system))}
        live: list[list[Message]] = []
        asks = []
        for _ in range(self.num_requests):
            is_full = len(live) >= self.num_live
            messages = (
                live.pop(writer.random.randrange(self.num_live - self.pause))
                if is_full
                else [rules]
            )
            asks.append(self._next_turn(writer, messages))
            if len(messages) < 2 * self.num_turns:
                live.append(messages)
        return asks

    def _next_turn(self, writer: Writer, messages: list[Message]) -> Ask:
        question = writer.text(writer.words(self.turn))
        messages.append({"role": "user", "content": question})
        ask = writer.chat(messages, self.answer)
        messages.append({"role": "assistant", "content": writer.text(ask.answer)})
        return ask


def all_workloads(traces: Path) -> tuple[list[Workload], list[str]]:
    """The workloads, and a sentence for each that is missing."""
    found, missing = list(_MADE_UP), []
    for name, file in TRACE_FILES.items():
        if (traces / file).exists():
            found.append(_of_trace(name, traces / file))
        else:
            missing.append(f"{name} is skipped: {traces / file} is not there")
    return found, missing


def _of_trace(name: str, path: Path) -> Workload:
    return Workload(
        name=name,
        num_engines=4,
        cache_tokens=16_384,
        clients=(16,),
        num_warm_up=40,
        is_bound=True,
        make=TraceSample(path=path, num_requests=160),
    )


TRACE_FILES: Final = {
    "mooncake_conversation": "conversation_trace.jsonl",
    "mooncake_synthetic": "synthetic_trace.jsonl",
}
_MADE_UP: Final = (
    # The caches hold 32 k tokens each, the documents are 48 k: they fit if each lives in one place.
    Workload(
        name="docs8",
        num_engines=2,
        cache_tokens=32_768,
        clients=(2, 8),
        num_warm_up=40,
        is_bound=True,
        make=Documents(num_requests=140, num_documents=8, document=6000, own=40, answer=1),
    ),
    Workload(
        name="fits",
        num_engines=2,
        cache_tokens=32_768,
        clients=(8,),
        num_warm_up=40,
        is_bound=False,
        make=Documents(num_requests=180, num_documents=4, document=4000, own=40, answer=8),
    ),
    Workload(
        name="docs32_short",
        num_engines=4,
        cache_tokens=16_384,
        clients=(16,),
        num_warm_up=64,
        is_bound=True,
        make=Documents(num_requests=200, num_documents=32, document=2000, own=40, answer=8),
    ),
    Workload(
        name="docs32_long",
        num_engines=4,
        cache_tokens=16_384,
        clients=(32,),
        num_warm_up=48,
        is_bound=True,
        make=Documents(num_requests=160, num_documents=32, document=2000, own=40, answer=64),
    ),
    Workload(
        name="conversations",
        num_engines=4,
        cache_tokens=16_384,
        clients=(12,),
        num_warm_up=60,
        is_bound=True,
        make=Conversations(
            num_requests=200,
            num_live=44,
            num_turns=8,
            pause=24,
            system=96,
            turn=300,
            answer=24,
        ),
    ),
    Workload(
        name="unshared",
        num_engines=4,
        cache_tokens=32_768,
        clients=(16,),
        num_warm_up=30,
        is_bound=False,
        make=Unshared(num_requests=140, prompt=(400, 1600), answer=16),
    ),
    Workload(
        name="hot_prefix",
        num_engines=4,
        cache_tokens=32_768,
        clients=(16,),
        num_warm_up=40,
        is_bound=False,
        make=HotPrefix(num_requests=180, prefix=2000, own=200, answer=16, hot_share=0.9),
    ),
)
