"""`python -m kvplug.sim`: what would these policies have done with this traffic?

In:  argv: a trace or a log, a fleet, policies.
Out: a table on stdout; on demand JSON and a plot. Exit code 2 and one sentence for wrong input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Final, get_args

from kvplug._version import __version__
from kvplug.errors import ConfigError
from kvplug.sim.replay import report
from kvplug.sim.replay.engine import EngineSpec
from kvplug.sim.replay.fleet import Arrivals
from kvplug.sim.replay.policies import NAMES, make_policy
from kvplug.sim.replay.specs import (
    DEFAULT_CACHE_TOKENS,
    EngineSettings,
    read_fleet,
    settings_of,
)
from kvplug.sim.replay.study import Cell, run_cells
from kvplug.sim.replay.traces import MOONCAKE_TOKENS, Kind, LogWindow, kind_of, read

DEFAULT_POLICIES: Final = "round_robin,least_loaded,cache_aware,kv"
_ENGINE: Final = EngineSettings()
_ENGINE_HELP: Final = {
    "blocks": "blocks that each engine's cache has, instead of --cache-tokens",
    "cache_tokens": f"tokens that each engine's cache has room for ({DEFAULT_CACHE_TOKENS})",
    "max_num_seqs": "requests that an engine runs at a time",
    "max_num_batched_tokens": "tokens that a step computes at most",
    "prefill_tokens_per_s": "prompt tokens that an engine computes per second",
    "decode_base_s": "what a step with any decode costs, s",
    "decode_per_sequence_s": "what each sequence that decodes adds to it, s",
    "step_overhead_s": "what any step costs, s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is to be run: each policy on each seed's window of the log."""

    window: LogWindow
    specs: tuple[EngineSpec, ...]
    arrivals: Arrivals
    policies: tuple[str, ...]
    num_seeds: int
    warm: float

    def cells(self) -> list[Cell]:
        """Seed by seed, so that neighbours share their requests."""
        return [
            Cell(
                workload=self.window,
                specs=self.specs,
                policy=policy,
                arrivals=self.arrivals,
                seed=seed,
                warm=self.warm,
            )
            for seed in range(self.num_seeds)
            for policy in self.policies
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study and print what it found; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        _run(options)
    except ConfigError as error:
        sys.stderr.write(f"kvplug.sim: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run(options: argparse.Namespace) -> None:
    study = _study(options)
    _require_writable(options)
    sys.stdout.write(f"{description(study)}\n\n")
    sys.stdout.flush()
    shows = sys.stderr.isatty() and _has_tqdm()
    summaries = run_cells(study.cells(), options.processes, show_progress=shows)
    num_policies = len(study.policies)
    results = {
        policy: summaries[number::num_policies] for number, policy in enumerate(study.policies)
    }
    sys.stdout.write("\n".join([report.table_of(results), "", *_legend(study), ""]))
    _write(options, study, results)


def _write(options: argparse.Namespace, study: Study, results: report.Summaries) -> None:
    try:
        if options.json:
            text = json.dumps({**_as_json(study), "policies": report.as_json(results)}, indent=1)
            options.json.write_text(text + "\n")
        if options.plot:
            report.plot(results, options.plot, description(study))
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error


def description(study: Study) -> str:
    """The log, the fleet and how it is run, in three lines."""
    window, num_engines = study.window, len(study.specs)
    requests = read(window.path, window.kind, window.block_size).requests
    what = "Mooncake trace" if window.kind == "mooncake" else "log"
    lines = [
        f"{what} {window.path.name}: {len(requests):,} requests in "
        f"{requests[-1].arrival_s or 0.0:,.0f} s, blocks of {window.block_size} tokens",
        f"{num_engines} engine{'s' * (num_engines > 1)} with a cache of {_caches(study.specs)} "
        f"blocks; {_arrivals(study.arrivals)}",
        f"{_windows(study, len(requests))}; the first {study.warm:.0%} of requests not counted",
    ]
    return "\n".join(lines)


def _windows(study: Study, num_requests: int) -> str:
    num_seeds, wanted = study.num_seeds, study.window.num_requests
    if 0 < wanted < num_requests:
        return f"{num_seeds} random window{'s' * (num_seeds > 1)} of {wanted:,} requests"
    return f"the whole file, {num_seeds} time{'s' * (num_seeds > 1)}"


def _caches(specs: Sequence[EngineSpec]) -> str:
    sizes = [f"{spec.num_blocks:,}" for spec in specs]
    return sizes[0] if len(set(sizes)) == 1 else " + ".join(sizes)


def _arrivals(arrivals: Arrivals) -> str:
    if arrivals.clients:
        return f"{arrivals.clients} clients, each waits for its answer"
    if arrivals.rate:
        return f"{arrivals.rate:g} requests/s at random times"
    return "arrivals as in the file" + ("" if arrivals.speed == 1 else f", x {arrivals.speed:g}")


def _legend(study: Study) -> list[str]:
    lines = list(report.LEGEND)
    if study.num_seeds > 1 and len(study.policies) > 1:
        lines.append("±: half of the 95 % interval of the mean difference, seed by seed (t)")
    return lines


def _as_json(study: Study) -> dict[str, Any]:
    window = study.window
    return {
        "log": {
            "path": str(window.path),
            "kind": window.kind,
            "block_size": window.block_size,
            "num_requests": window.num_requests,
        },
        "fleet": [asdict(spec) for spec in study.specs],
        "arrivals": asdict(study.arrivals),
        "warm": study.warm,
    }


def _study(options: argparse.Namespace) -> Study:
    kind: Kind = kind_of(options.log) if options.format == "auto" else options.format
    block_size = options.block_size or (MOONCAKE_TOKENS if kind == "mooncake" else 16)
    window = LogWindow(
        path=options.log, kind=kind, block_size=block_size, num_requests=options.requests
    )
    specs = _specs(options, block_size)
    policies = tuple(dict.fromkeys(options.policies.split(",")))
    for policy in policies:
        make_policy(policy, specs, 0)  # refuses what it does not know
    read(options.log, kind, block_size)
    return Study(
        window=window,
        specs=specs,
        arrivals=Arrivals(clients=options.clients, rate=options.rate, speed=options.speed),
        policies=policies,
        num_seeds=options.seeds,
        warm=options.warm,
    )


def _specs(options: argparse.Namespace, block_size: int) -> tuple[EngineSpec, ...]:
    values = {name: getattr(options, name) for name in _ENGINE_HELP}
    if options.fleet is None:
        spec = settings_of(values).spec(block_size)
        return tuple(spec for _ in range(options.engines))
    return tuple(engine.spec(block_size) for engine in read_fleet(options.fleet, values))


def _require_writable(options: argparse.Namespace) -> None:
    """Before minutes of work, not after."""
    for path in filter(None, (options.json, options.plot)):
        if not path.parent.is_dir() or path.is_dir():
            raise ConfigError(f"cannot write {path}: expected a file in a folder that exists")
    if options.plot:
        report.require_plot(options.plot)


def _has_tqdm() -> bool:
    if find_spec("tqdm") is not None:
        return True
    sys.stderr.write("no progress bar without tqdm: pip install 'kvplug[sim]'\n")
    return False


def _number(
    kind: type[Any], is_fitting: Callable[[Any], bool], expected: str
) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:  # noqa: ANN401 - an int or a float, as `kind` is
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not is_fitting(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parsed


_count = _number(int, lambda n: n >= 0, "a whole number of at least 0")
_positive = _number(int, lambda n: n >= 1, "a whole number of at least 1")
_above_0 = _number(float, lambda x: isfinite(x) and x > 0, "a number above 0")
_share = _number(float, lambda x: 0 <= x < 1, "a number of at least 0 and less than 1")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvplug.sim",
        description="What would a routing policy have done with this traffic? Replays a trace or "
        "a request log on simulated engines, in virtual time. See docs/simulation.md.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvplug {__version__}")
    _add_traffic(parser.add_argument_group("traffic"))
    _add_arrivals(parser.add_argument_group("arrivals").add_mutually_exclusive_group())
    _add_fleet(parser.add_argument_group("fleet"))
    _add_study(parser.add_argument_group("study"))
    return parser


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("log", type=Path, metavar="FILE", help="a Mooncake trace, or a log (JSON lines or CSV)")
    add(
        "--format",
        choices=["auto", *get_args(Kind)],
        default="auto",
        help="mooncake: timestamps in ms, hash_ids of 512 tokens; log: in s, hash_ids of a block; "
        "auto takes JSON lines with hash_ids for mooncake",
    )
    add("--requests", type=_count, default=2000, metavar="N", help="of a window; 0 is the file")
    add("--warm", type=_share, default=0.2, help="share of the first requests not counted")


def _add_arrivals(group: argparse._MutuallyExclusiveGroup) -> None:
    add = group.add_argument
    add("--speed", type=_above_0, default=1.0, help="times as fast as the file says")
    add("--rate", type=_above_0, default=0.0, help="requests per second, at random times")
    add("--clients", type=_positive, default=0, help="that send when they have their answer")


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--engines", type=_positive, default=4, metavar="N", help="equal engines")
    add(
        "--fleet",
        type=Path,
        metavar="FILE",
        help="engines that differ: a JSON list, one object per engine, with keys as the flags "
        "below that differ from them",
    )
    add("--block-size", type=_positive, help="tokens per block; 16, for Mooncake traces 512")
    for name, text in _ENGINE_HELP.items():
        default = getattr(_ENGINE, name)
        kind = int if default is None else type(default)
        add("--" + name.replace("_", "-"), type=kind, default=default, help=text)


def _add_study(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--policies",
        default=DEFAULT_POLICIES,
        help=f"with commas between, of {', '.join(NAMES)}; compared with the first",
    )
    add("--seeds", type=_positive, default=5, help="windows, and draws of chance")
    add("--processes", type=_positive, help="one per core if not given")
    add("--json", type=Path, metavar="FILE", help="write all numbers there")
    add("--plot", type=Path, metavar="FILE.png", help="draw a plot there")
