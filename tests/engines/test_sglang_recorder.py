"""kvplug's recorders in SGLang's own caches: the events are SGLang's, field by field."""

import json
import os
import subprocess
from collections import Counter
from itertools import product
from pathlib import Path

import msgspec
import pytest

from examples.launch.sglang_env import ensure_sglang
from examples.launch.sglang_server import ENGINE_ENV
from kvplug.engines.sglang_notes import Expander, NotesError
from tests.engines.engine_pool import Recipe, uses

ROOT = Path(__file__).parents[2]
KINDS = ("simple", "python", "rust")


class Caches:
    """SGLang's caches, in SGLang's interpreter; `call` a function of sglang_cache_driver.py."""

    def start(self):
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [ensure_sglang(), "-m", "tests.engines.sglang_cache_driver"],
            cwd=ROOT,
            env={**os.environ, **ENGINE_ENV, "PYTHONPATH": str(ROOT)},
            stdin=pipe,
            stdout=pipe,
            text=True,
        )

    def wait_ready(self):
        assert self._process.stdout.readline() == '"ready"\n'

    def call(self, function, *args, **more):
        assert not args
        self._process.stdin.write(json.dumps({"call": function, **more}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def stop(self):
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


CACHES = Recipe("caches", lambda _: Caches())
pytestmark = uses(CACHES)


def settings_of(kind, page_size=4, *, is_eagle=False, dynamo=False):
    return {"kind": kind, "page_size": page_size, "is_eagle": is_eagle, "dynamo": dynamo}


def events_in(payload):
    return msgspec.msgpack.decode(bytes.fromhex(payload))[1]


def expander_for(settings, **more):
    context = {"page_size": settings["page_size"], "dynamo_format": settings["dynamo"]}
    return Expander(context | {"names_extra_keys": False} | more)


@pytest.mark.parametrize(("is_eagle", "dynamo"), [*product((False, True), repeat=2)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_events_are_sglangs_own(engine, kind, page_size, is_eagle, dynamo):
    settings = settings_of(kind, page_size, is_eagle=is_eagle, dynamo=dynamo)
    kinds, media, more = Counter(), Counter(), Counter()
    for seed in range(3):
        expander = expander_for(settings)
        for stock, ours, failures in engine.call("play", settings=settings, seed=seed, size=150):
            assert not failures
            expected = events_in(stock)
            # Encoded, so that the order of fields counts, too.
            assert msgspec.msgpack.encode(
                expander.expand(events_in(ours))
            ) == msgspec.msgpack.encode(expected)
            kinds.update(event["type"] for event in expected)
            media.update(event.get("medium") for event in expected)
            more.update(field for event in expected for field in event)
    assert min(kinds[name] for name in ("BlockStored", "BlockRemoved", "AllBlocksCleared")) > 2
    assert more["cache_salt"] > 10
    assert more["lora_name"] > 10
    assert media["CPU_PINNED"] > 10 or kind != "python"


@pytest.mark.parametrize("kind", KINDS)
def test_on_our_wire_only_extra_keys_make_a_difference(engine, kind):
    settings = settings_of(kind)
    stock, ours = expander_for(settings), expander_for(settings, names_extra_keys=True)
    for _, payload, _ in engine.call("play", settings=settings, seed=1, size=150):
        pairs = zip(stock.expand(events_in(payload)), ours.expand(events_in(payload)), strict=False)
        for expected, said in pairs:
            if "extra_key" not in said.get("cache_salt", "") and said["type"] == "BlockStored":
                assert said == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorder_that_fails_lets_sglangs_go_on(engine, kind):
    settings = settings_of(kind)
    expander, has_failed = expander_for(settings), False
    played = engine.call("play", settings=settings, seed=2, size=150, fails_at=40)
    for stock, ours, failures in played:
        assert len(failures) <= 1
        if has_failed:
            assert ours == stock
        elif not failures:
            assert expander.expand(events_in(ours)) == events_in(stock)
        has_failed = bool(failures)
    assert has_failed


@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_guard_has_no_objection_to_sglang_as_it_is(engine, kind, is_eagle):
    assert engine.call("objection_to", kind=kind, is_eagle=is_eagle) is None


@pytest.mark.parametrize(
    ("kind", "what", "reason"),
    [
        *((kind, "version", "SGLang 0.5.99 is not known") for kind in KINDS),
        *((kind, "hash", "it says something else") for kind in ("simple", "python")),
        ("rust", "conversion", "it says something else"),
        ("rust", "field", "it says something else"),
        ("simple", "recorder", "a OtherRecorder of a RadixCache is not known"),
        ("simple", "signature", "it cannot be tried: TypeError"),
    ],
)
def test_the_guard_refuses_another_sglang(engine, kind, what, reason):
    assert reason in engine.call("doctored", kind=kind, what=what)


def test_lost_notes_make_nothing_wrong(engine):
    """What is still said after a loss is right; the rest is left out until all is cleared."""
    settings = settings_of("python")
    played = engine.call("play", settings=settings, seed=3, size=150)
    expander, said = expander_for(settings), 0
    for number, (stock, ours, _) in enumerate(played):
        if number % 7 == 3:
            expander.forget()
            continue
        names = {name for event in events_in(stock) for name in event.get("block_hashes", ())}
        try:
            events = expander.expand(events_in(ours))
        except NotesError:
            continue
        said += len(events)
        assert names.issuperset(name for event in events for name in event.get("block_hashes", ()))
    assert said > 10
