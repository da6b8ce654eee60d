"""Traces and request logs as workloads.

In:  a file of one request a line.   Out: a Workload of all of them, or of a random window.

    mooncake  JSON lines: timestamp in ms, input_length, output_length, and hash_ids, one for each
              512 tokens of the prompt and one for the rest
    log       JSON lines, or CSV with a header: timestamp in seconds, input_length, output_length,
              and at most one of
                hash_ids                one per block of the engines (in CSV with spaces between)
                session                 the prompt begins with the session's last prompt and answer;
                                        one that is shorter than these begins the session anew
                prefix, prefix_length   the prompt begins with as many tokens of a named text

Lengths are in tokens. Equal hash_ids stand for equal tokens behind equal beginnings. Only full
blocks can be shared: those of the rest of a prompt that is shorter than a block are left out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from kvplug.errors import ConfigError
from kvplug.router.options import MAX_TOKENS
from kvplug.sim.replay.workload import U64, BlockSource, Request, Workload, request_of

Kind = Literal["mooncake", "log"]
MOONCAKE_TOKENS: Final = 512
"""Tokens that a hash id of a Mooncake trace stands for."""

# A line with a length in bytes or a wrong unit would otherwise ask for all memory.
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
_Name = str | int


class _Line(msgspec.Struct, kw_only=True):
    timestamp: float
    input_length: _Count
    output_length: _Count
    hash_ids: list[int] | None = None
    session: _Name | None = None
    prefix: _Name | None = None
    prefix_length: Annotated[int, msgspec.Meta(ge=0)] | None = None


_decode = msgspec.json.Decoder(_Line).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWindow:
    """As many requests in a row, from a random one on; all of them if num_requests is 0, or not
    fewer than the file has.
    """

    path: Path
    kind: Kind
    block_size: int
    num_requests: int = 0

    def make(self, seed: int) -> Workload:
        """The same window for the same seed; its first request comes at 0 s."""
        whole = read(self.path, self.kind, self.block_size)
        requests, wanted = whole.requests, self.num_requests
        if not 0 < wanted < len(requests):
            return whole
        start = int(np.random.default_rng(seed).integers(len(requests) - wanted + 1))
        window = requests[start : start + wanted]
        since = window[0].arrival_s or 0.0
        shifted = [replace(r, arrival_s=(r.arrival_s or 0.0) - since) for r in window]
        return Workload(name=whole.name, block_size=self.block_size, requests=shifted)


def kind_of(path: Path) -> Kind:
    """`mooncake` for JSON lines of which the first has hash_ids, else `log`."""
    if _is_csv(path):
        return "log"
    for _, line in _json_lines(path):
        return "mooncake" if line.hash_ids is not None else "log"
    raise ConfigError(f"{path}: expected one request a line, got an empty file")


@lru_cache(maxsize=2)
def read(path: Path, kind: Kind, block_size: int) -> Workload:
    """All requests in order of arrival, the first at 0 s; ConfigError names the line."""
    id_tokens = MOONCAKE_TOKENS if kind == "mooncake" else block_size
    if id_tokens % block_size:
        raise ConfigError(
            f"{path}: its hash ids stand for {id_tokens} tokens each, so blocks have to be "
            f"{id_tokens} tokens or a divisor, got {block_size}"
        )
    lines = sorted(_lines(path), key=lambda numbered: numbered[1].timestamp)
    if not lines:
        raise ConfigError(f"{path}: expected one request a line, got an empty file")
    sharing, unit_s = _Sharing(block_size, id_tokens), 1e-3 if kind == "mooncake" else 1.0
    first, requests = lines[0][1].timestamp, []
    for number, line in lines:
        try:
            _require_fields(line, kind)
            request = sharing.request(line)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        request.arrival_s = (line.timestamp - first) * unit_s
        requests.append(request)
    return Workload(name=path.name, block_size=block_size, requests=requests)


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def _lines(path: Path) -> Iterator[tuple[int, _Line]]:
    """(line number, line) of each request."""
    for number, line in _csv_lines(path) if _is_csv(path) else _json_lines(path):
        if not isfinite(line.timestamp):
            raise ConfigError(
                f"{path}, line {number}: timestamp must be finite, got {line.timestamp}"
            )
        yield number, line


def _json_lines(path: Path) -> Iterator[tuple[int, _Line]]:
    for number, text in enumerate(_text_of(path).split("\n"), 1):
        if text.strip():
            try:
                yield number, _decode(text)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error


def _csv_lines(path: Path) -> Iterator[tuple[int, _Line]]:
    reader = csv.DictReader(StringIO(_text_of(path), newline=""))
    for row in reader:
        # An empty cell is a field that is not there; a surplus one comes under None.
        fields: dict[str, Any] = {key: cell for key, cell in row.items() if key and cell}
        if "hash_ids" in fields:
            fields["hash_ids"] = fields["hash_ids"].split()
        try:
            yield reader.line_num, msgspec.convert(fields, _Line, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}") from error


class _Sharing:
    """Blocks of requests, line by line: equal where the lines say that tokens are."""

    def __init__(self, block_size: int, id_tokens: int) -> None:
        self.size, self.id_tokens = block_size, id_tokens
        self.source = BlockSource(0)
        self._of_id: dict[int, U64] = {}
        self._of_prefix: dict[_Name, U64] = {}
        self._last_of: dict[_Name, Request] = {}

    def request(self, line: _Line) -> Request:
        """The request of the next line; ConfigError if its lengths do not fit together."""
        prefix = self._prefix(line)
        request = request_of(self.source, prefix, line.input_length, line.output_length, self.size)
        if line.session is not None:
            self._last_of[line.session] = request
        return request

    def _prefix(self, line: _Line) -> U64:
        if line.hash_ids is not None:
            return self._blocks_of_ids(line, line.hash_ids)
        if line.prefix is not None:
            return self._blocks_of_prefix(line, line.prefix, line.prefix_length or 0)
        last = None if line.session is None else self._last_of.get(line.session)
        if last is None or line.input_length < last.num_tokens + last.num_answer_tokens:
            return self.source.take(0)
        return np.concatenate([last.blocks, last.answer_blocks])

    def _blocks_of_ids(self, line: _Line, ids: list[int]) -> U64:
        num_full = line.input_length // self.id_tokens
        num_all = -(-line.input_length // self.id_tokens)
        if not num_full <= len(ids) <= num_all:
            raise ConfigError(
                f"expected {num_all} hash_ids for {line.input_length} tokens in blocks of "
                f"{self.id_tokens}, got {len(ids)}"
            )
        for id_ in ids:
            if id_ not in self._of_id:
                self._of_id[id_] = self.source.take(self.id_tokens // self.size)
        blocks = [self._of_id[id_] for id_ in ids]
        return np.concatenate([self.source.take(0), *blocks])[: line.input_length // self.size]

    def _blocks_of_prefix(self, line: _Line, name: _Name, num_tokens: int) -> U64:
        if not 0 < num_tokens <= line.input_length:
            raise ConfigError(
                f"expected a prefix_length in [1, {line.input_length}], the prompt's length, "
                f"got {line.prefix_length}"
            )
        known = self._of_prefix.get(name, self.source.take(0))
        num_blocks = num_tokens // self.size
        if len(known) < num_blocks:
            known = np.concatenate([known, self.source.take(num_blocks - len(known))])
            self._of_prefix[name] = known
        return known[:num_blocks]


def _require_fields(line: _Line, kind: Kind) -> None:
    named = [name for name in ("hash_ids", "session", "prefix") if getattr(line, name) is not None]
    if len(named) > 1:
        raise ConfigError(f"expected one of hash_ids, session, prefix; got {' and '.join(named)}")
    if kind == "mooncake" and line.hash_ids is None:
        raise ConfigError("expected hash_ids, as each line of a Mooncake trace has them")
    if line.prefix_length is not None and line.prefix is None:
        raise ConfigError("prefix_length needs a prefix")
