"""Requests made from /openapi.json, valid and not, to a served router: none is answered with 500.

usage: python -m tests.fuzz.service [--examples N] [--seed N]

In:  nothing; a simulated engine and the router are started here.
Out: a row for each operation with the statuses it gave; exit code 1 if one was a 500 or none came.

502 to 504 are the router's words about workers, and it is asked to add workers that do not exist.
"""

import argparse
import contextlib
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from examples.launch.engine_env import ensure_tiny_tokenizer
from examples.launch.engine_server import MODEL_NAME
from examples.launch.router_process import RouterProcess
from examples.launch.sim_server import SimServer, SimSettings

# Bodies of engines are described as any object: these fields take a request past the first check.
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda of: st.lists(of, max_size=4) | st.dictionaries(st.text(max_size=8), of, max_size=4),
    max_leaves=12,
)
GOOD = {
    **{"model": MODEL_NAME, "max_tokens": 2, "text": "Hello", "query": "Hello", "tokens": [5, 6]},
    **{"prompt": "Hello", "input": "Hello"},
    "messages": [{"role": "user", "content": "Hello"}],
}
PROMPT = st.text(max_size=60) | st.lists(st.integers(-1, 2**33), max_size=40) | JSON
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]) | JSON, "content": JSON})
CHANGES = {
    **dict.fromkeys(("prompt", "input", "text", "query", "tokens", "documents"), PROMPT),
    **dict.fromkeys(("tools", "cache_salt", "lora_path", "stream_options", "stream"), JSON),
    **{name: st.integers() | JSON for name in ("max_tokens", "n", "truncate_prompt_tokens")},
    **dict.fromkeys(("add_special_tokens", "chat_template_kwargs", "session_id", "user"), JSON),
    "messages": st.lists(MESSAGE, max_size=3) | JSON,
    "stream": st.booleans(),
}
FIELDS = st.sets(st.sampled_from(sorted(CHANGES)), max_size=2).flatmap(
    lambda names: st.fixed_dictionaries({name: CHANGES[name] for name in sorted(names)})
)
ABOUT_WORKERS = {502, 503, 504}
LIMIT_S = 30.0
NOT_SENT = "not sent"  # infinity, which is no JSON


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.service")
    parser.add_argument("--examples", type=int, default=300, help="of each operation (300)")
    parser.add_argument("--seed", type=int, default=1, help="of the examples (1)")
    options = parser.parse_args()
    defects = fuzz(options.examples, options.seed)
    for defect in defects:
        print(f"WRONG: {defect}")
    return int(bool(defects))


def fuzz(num_examples, first_seed):
    """What went wrong."""
    defects = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplug-fuzz-")))
        tokenizer = ensure_tiny_tokenizer()
        engine = SimServer("engine", SimSettings(tokenizer_dir=tokenizer), log_dir=folder)
        stack.enter_context(engine)
        engine.wait_ready()
        router = RouterProcess("kv", [engine], model_dir=tokenizer, log_dir=folder)
        stack.enter_context(router)
        router.wait_ready()
        session = stack.enter_context(requests.Session())
        for name, operation in operations(router.url):
            seen = _ask(operation, session, num_examples, first_seed)
            print(f"{name:42} {dict(sorted(seen.items(), key=str))}", flush=True)
            defects += [f"{name}: {what}" for what in seen if _is_wrong(what)]
        assert session.get(f"{router.url}/health", timeout=LIMIT_S).status_code in (200, 503)
        log = router.log_path.read_text(errors="replace")
    if "Traceback" in log:
        defects.append("a traceback in the log:\n" + log[log.index("Traceback") :][:3000])
    return defects


def operations(url):
    """(name, operation) of each route that is described."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    for result in schema.get_all_operations():
        operation = result.ok()
        yield operation.label, operation


def _ask(operation, session, num_examples, first_seed):
    """Statuses, or how else it ended, with how often."""
    seen = Counter()
    for ask in _forms(operation, lambda case: seen.update([_status(case, session)])):
        with contextlib.suppress(Unsatisfiable):  # nothing can be wrong in a request without fields
            _with_settings(ask, num_examples // 3, first_seed)()
    return seen


def _status(case, session):
    try:
        return case.call(session=session, timeout=LIMIT_S).status_code
    except requests.exceptions.InvalidJSONError:
        return NOT_SENT
    except requests.RequestException as error:
        return type(error).__name__


def _forms(operation, send):
    """As described; not as described; with a good body for engines, in which little is wrong."""

    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def as_described(case):
        send(case)

    @given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def not_as_described(case):
        send(case)

    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE), fields=FIELDS)
    def as_for_engines(case, fields):
        if isinstance(case.body, dict):
            case.body = GOOD | fields
        send(case)

    return as_described, not_as_described, as_for_engines


def _with_settings(ask, num_examples, first_seed):
    return seed(first_seed)(
        settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(ask)
    )


def _is_wrong(what):
    if what == NOT_SENT:
        return False
    return not isinstance(what, int) or (what >= 500 and what not in ABOUT_WORKERS)


if __name__ == "__main__":
    raise SystemExit(main())
