"""Outcomes as a table.

In:  engine, scenario, Outcome.   Out: lines of Markdown; what is wrong with an outcome.
"""

WRONG_LIMIT_S = 5.0
HEADINGS = (
    *("engine", "fault", "messages read", "blocks", "apart", "trust", "s to repair"),
    *("longest wrong EXACT, s", "lives", "asks", "redelivered"),
)


def defects(outcome):
    """In sentences."""
    found = []
    for (replica, engine), seen in outcome.seen.items():
        whose = f"replica {replica}, {engine}"
        if seen.level == "exact" and seen.num_apart:
            found.append(
                f"{whose}: exact, and {seen.only_in_engine} blocks of the engine are unknown, "
                f"{seen.only_in_index} are believed that it does not hold"
            )
        if seen.level != "exact":
            named = f"{seen.reason}; {seen.fix}" if seen.reason and seen.fix else "no reason or fix"
            found.append(f"{whose}: {seen.level}: {named}; {seen.num_apart} blocks apart")
    if not found and outcome.repair_s is None:
        found.append("it did not come to rest in time")
    if outcome.wrong.seconds > WRONG_LIMIT_S:
        found.append(f"wrong and EXACT for {outcome.wrong.seconds:.1f} s: {outcome.wrong.what}")
    return found


def header():
    return f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}"


def row(kind, scenario_name, outcome):
    levels = sorted({seen.level for seen in outcome.seen.values()})
    repair = "" if outcome.repair_s is None else f"{outcome.repair_s:.1f}"
    counted = [
        outcome.counters.get(f"num_{name}", 0)
        for name in ("messages", "restarts", "replays", "duplicates")
    ]
    cells = (
        *(kind, scenario_name, counted[0], outcome.num_held, outcome.num_apart),
        *(", ".join(levels), repair, f"{outcome.wrong.seconds:.1f}", *counted[1:]),
    )
    return f"| {' | '.join(map(str, cells))} |"
