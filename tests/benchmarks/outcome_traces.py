"""Mooncake's traces as requests of `make bench-outcome`, scaled down.

In:  JSON lines with `input_length`, `output_length` and `hash_ids`, one for each 512 tokens.
Out: requests that share what those of the trace share.

A part of a trace in a row shares nothing: turns of a conversation are minutes apart. So whole
conversations are drawn, which are requests with the same second id (the first is the system prompt
where all have one), and stay in the order of the trace. Each length is divided by SCALE.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.benchmarks.outcome_requests import Ask, Writer

ID_TOKENS, SCALE = 512, 16
LONGEST_GROUP = 100
"""Requests with the same ids; more of them are no conversation."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSample:
    """About `num_requests` requests of a trace."""

    path: Path
    num_requests: int

    def __call__(self, seed: int) -> list[Ask]:
        """Conversations drawn by the seed."""
        lines, writer = _read(self.path), Writer(seed)
        words: dict[int, list[int]] = {}
        asks = []
        for number in _draw(lines, self.num_requests, seed):
            line = lines[number]
            for id_ in line["hash_ids"]:
                if id_ not in words:
                    words[id_] = writer.words(ID_TOKENS // SCALE)
            prompt = [word for id_ in line["hash_ids"] for word in words[id_]]
            length = max(1, line["input_length"] // SCALE)
            asks.append(writer.completion(prompt[:length], max(1, line["output_length"] // SCALE)))
        return asks


def _draw(lines: Sequence[Line], num_requests: int, seed: int) -> list[int]:
    """Numbers of lines."""
    firsts = Counter(line["hash_ids"][0] for line in lines)
    groups: dict[int, list[int]] = defaultdict(list)
    for number, line in enumerate(lines):
        ids = line["hash_ids"]
        is_common = firsts[ids[0]] > LONGEST_GROUP and len(ids) > 1
        groups[ids[1] if is_common else ids[0]].append(number)
    keys = sorted(key for key, group in groups.items() if len(group) <= LONGEST_GROUP)
    random.Random(seed).shuffle(keys)
    drawn: list[int] = []
    for key in keys:
        if len(drawn) >= num_requests:
            break
        drawn += groups[key]
    return sorted(drawn)[:num_requests]


@lru_cache
def _read(path: Path) -> Sequence[Line]:
    with path.open() as lines:
        return [json.loads(line) for line in lines]
