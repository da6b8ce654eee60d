"""Outcomes as a table.

In:  engine, scenario, Outcome.   Out: lines of Markdown; and whether an outcome is what it must be.
"""

from statistics import median

from tests.chaos.faults import Fault

HEADINGS = (
    *("engine", "fault", "messages", "lost", "twice", "late", "delayed", "cut off"),
    *("blocks in the engine", "only there", "only in the index", "trust"),
    *("repairs", "p50 ms", "max ms", "ms after the fault"),
)


def defects(outcome, expects):
    """What is wrong, in sentences."""
    found = []
    if outcome.level != expects:
        found.append(f"trust is {outcome.level}, expected {expects}")
    if expects == "exact" and outcome.only_in_engine:
        found.append(f"{outcome.only_in_engine} blocks of the engine are unknown")
    if outcome.only_in_index:
        found.append(f"{outcome.only_in_index} blocks are believed that the engine does not hold")
    if outcome.level == "stale" and not (outcome.reason and outcome.fix):
        found.append("neither reason nor fix is named")
    return found


def header():
    return f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}"


def row(engine_name, scenario_name, outcome):
    counts = outcome.counts
    lost_and_so_on = (Fault.DROP, Fault.DUPLICATE, Fault.HOLD, Fault.DELAY, "cut off")
    cells = (
        *(engine_name, scenario_name, outcome.num_messages),
        *(counts.get(kind, 0) for kind in lost_and_so_on),
        *(outcome.num_held, outcome.only_in_engine, outcome.only_in_index, outcome.level),
        *_repair_cells(outcome),
    )
    return f"| {' | '.join(map(str, cells))} |"


def spread(repairs_s):
    """Repair times of many scenarios, in a sentence."""
    if not repairs_s:
        return "no repairs"
    ordered = sorted(repairs_s)
    tenth = len(ordered) // 10
    return (
        f"{len(ordered)} repairs: p50 {_ms(median(ordered))} ms, p10 {_ms(ordered[tenth])} ms, "
        f"p90 {_ms(ordered[-1 - tenth])} ms, longest {_ms(ordered[-1])} ms"
    )


def _repair_cells(outcome):
    repairs = outcome.repairs_s
    p50_and_max = (_ms(median(repairs)), _ms(max(repairs))) if repairs else ("", "")
    after_fault = "" if outcome.after_fault_s is None else _ms(outcome.after_fault_s)
    return len(repairs), *p50_and_max, after_fault


def _ms(seconds):
    return f"{seconds * 1000:.0f}"
