"""Each cause by its name: what is known of a worker, and the findings that follow."""

from collections import Counter, deque

import pytest

from kvplug.audit.ledger import RankLedger
from kvplug.events import Rank
from kvplug.router.cache_sizes import CacheSize
from kvplug.server.diagnosis.checks import check_all
from kvplug.server.diagnosis.facts import EngineFacts
from kvplug.server.diagnosis.finding import Code
from kvplug.server.diagnosis.view import Disagreement, StreamView, WorkerView

URL = "http://a"
SOUND_STREAM = StreamView(connected=True, num_messages=9, num_stored=40)
SOUND_FACTS = EngineFacts(
    engine="vllm",
    version="0.32.0",
    block_size=16,
    caches=True,
    publishes=True,
    replays=True,
    topic="kv@a@m",
    num_ranks=1,
)


def view(**more):
    sound = {
        "rank": Rank(URL),
        "models": {"m": "/models/m"},
        "block_size": 16,
        "events": "tcp://127.0.0.1:5557",
        "topic": "kv@",
        "stream": SOUND_STREAM,
        "ledger": ledger(was_stored=[True] * 32),
        "facts": SOUND_FACTS,
    }
    return WorkerView(**(sound | more))


def facts(**more):
    return EngineFacts(
        **({name: getattr(SOUND_FACTS, name) for name in SOUND_FACTS.__struct_fields__} | more)
    )


def ledger(**more):
    result = RankLedger()
    for name, value in more.items():
        setattr(result, name, deque(value) if isinstance(value, list) else value)
    return result


def stream(**more):
    return StreamView(**({"connected": True, "num_messages": 9, "num_stored": 40} | more))


def test_a_sound_fleet_has_no_findings():
    assert check_all([view(), view(rank=Rank("http://b"))]) == []


def test_a_worker_of_which_nothing_is_known_yet_has_no_findings():
    quiet = stream(num_messages=0, num_stored=0)
    assert check_all([view(facts=EngineFacts(), ledger=None, stream=quiet)]) == []


def test_a_publisher_that_says_where_to_ask_needs_no_replay_endpoint():
    assert check_all([view(facts=facts(replays=False), stream=stream(answers=True))]) == []


@pytest.mark.parametrize(
    ("more", "code", "seen", "fix"),
    [
        ({"down_because": "gone"}, Code.WORKER_DOWN, "gone", "start the engine"),
        ({"facts": facts(publishes=False)}, Code.EVENTS_OFF, "without", "--kv-events-config '{"),
        (
            {"down_because": "no URL; set it", "is_found": False},
            Code.WORKER_UNKNOWN,
            "no URL",
            "set it",
        ),
        ({"events": None, "stream": None}, Code.NO_EVENT_ENDPOINT, "none", "events="),
        (
            {"events": None, "stream": None, "unreached": "tcp://127.0.0.1:5557"},
            Code.NO_EVENT_ENDPOINT,
            "tcp://127.0.0.1:5557",
            "an address of its machine",
        ),
        ({"stream": stream(connected=False)}, Code.EVENTS_DISCONNECTED, "no connection", "`*`"),
        (
            {"stream": stream(connected=False), "has_keys": True},
            Code.EVENTS_DISCONNECTED,
            "no connection",
            "a stock publisher has none",
        ),
        (
            {"stream": stream(skipped=Counter(unsupported_version=3))},
            Code.PROTOCOL_VERSION,
            "another version",
            "the same release",
        ),
        ({"facts": facts(topic="other")}, Code.TOPIC, "'other'", "topic="),
        (
            {
                "stream": stream(num_messages=0, num_stored=0),
                "ledger": ledger(was_stored=[False] * 8),
            },
            Code.NO_EVENTS,
            "none after 8",
            "endpoint",
        ),
        (
            {"ledger": ledger(was_stored=[False] * 8)},
            Code.NEVER_MATCHES,
            "40 blocks stored, none of 8 prompts",
            "chat template",
        ),
        (
            {"stream": stream(incomplete="a gap", fix="restart")},
            Code.EVENTS_INCOMPLETE,
            "a gap",
            "restart",
        ),
        (
            {"stream": stream(skipped=Counter(undecodable=2, duplicate=1))},
            Code.EVENTS_SKIPPED,
            "undecodable: 2",
            "docs/troubleshooting.md",
        ),
        ({"facts": facts(replays=False)}, Code.REPLAY_OFF, "none", '"replay_endpoint"'),
        (
            {"facts": facts(replays=True), "stream": stream(can_replay=False)},
            Code.REPLAY_OFF,
            "was not told of",
            "replay=ENDPOINT",
        ),
        (
            {"facts": facts(engine="sglang", event_format="default")},
            Code.EVENT_FORMAT,
            "default",
            '"format": "dynamo"',
        ),
        ({"facts": facts(block_size=32)}, Code.BLOCK_SIZE, "32", "--block-size 32"),
        (
            {"stream": stream(skipped=Counter(block_size=7))},
            Code.BLOCK_SIZE,
            "7 blocks refused",
            "--block-size 16",
        ),
        (
            {"cache_size": CacheSize(said=100, learned=300, problem="it holds 300 blocks")},
            Code.CACHE_CAPACITY,
            "300 blocks",
            "what evictions tell, 300 blocks",
        ),
        ({"facts": facts(caches=False)}, Code.PREFIX_CACHING_OFF, "off", "--enable-prefix"),
        ({"hashes_alone": True}, Code.HASH_MISMATCH, "equal blocks", "PYTHONHASHSEED"),
        (
            {"tokenization": Disagreement(ours="5 tokens", theirs="6 tokens")},
            Code.TOKENIZER,
            "6 tokens",
            "--tokenizer",
        ),
        (
            {"ledger": ledger(counts_differ=[True] * 3 + [False] * 5, last_counts=(5, 6))},
            Code.TOKENIZER,
            "6 tokens; 3 of 8",
            "--tokenizer",
        ),
        ({"untokenized": frozenset({"m"})}, Code.NO_TOKENIZER, "model 'm'", "--tokenizer"),
        ({"facts": facts(num_ranks=2)}, Code.DATA_PARALLEL, "2", "dp_size="),
        ({"ledger": ledger(num_silent=3)}, Code.NO_CACHED_TOKENS, "without", "prompt-tokens"),
        (
            {"facts": facts(engine="sglang", reports_cached=False)},
            Code.NO_CACHED_TOKENS,
            "without",
            "--enable-cache-report",
        ),
    ],
)
def test_each_cause_is_named_with_its_fix(more, code, seen, fix):
    [finding] = check_all([view(**more)])
    assert (finding.worker, finding.code) == (URL, code)
    assert seen in finding.seen
    assert fix in finding.fix


def test_prompts_may_be_in_a_rank_that_is_not_followed():
    unseen = view(ledger=ledger(was_stored=[False] * 8), facts=facts(num_ranks=2))
    assert [finding.code for finding in check_all([unseen])] == [Code.DATA_PARALLEL]


def test_a_rate_of_incorrect_routing_is_a_finding_once_enough_is_audited():
    audited = RankLedger()
    audited.num_by_verdict.update(wrong_resident=3, as_predicted=196)
    audited._wrong.extend([True] * 3 + [False] * 196)
    assert check_all([view(ledger=audited)]) == []
    audited.num_by_verdict["as_predicted"] += 1
    [finding] = check_all([view(ledger=audited)])
    assert (finding.code, finding.seen[:4]) == (Code.INCORRECT_ROUTING, "1.5%")


def test_the_format_does_not_matter_where_the_plug_in_names_extra_keys():
    default = facts(engine="sglang", event_format="default")
    assert check_all([view(facts=default, stream=stream(names_extra_keys=True))]) == []


def test_without_events_none_is_missed_and_the_rate_has_another_fix():
    audited = RankLedger()
    audited.num_by_verdict.update(wrong_speculative=10, as_predicted=190)
    audited._wrong.extend([True] * 10 + [False] * 190)
    silent = facts(publishes=False, replays=False, event_format="default")
    more = {"uses_events": False, "events": None, "stream": None, "facts": silent}
    assert check_all([view(**more)]) == []
    [finding] = check_all([view(**more, ledger=audited)])
    assert finding.code is Code.INCORRECT_ROUTING
    assert "--approximate-ttl-s" in finding.fix


def test_one_name_for_two_models_is_named():
    other = view(rank=Rank("http://b"), models={"m": "/models/other"})
    moved = view(rank=Rank("http://c"), models={"m": "/elsewhere/m/"})
    [finding] = check_all([view(), other, moved])
    assert (finding.worker, finding.code, finding.seen) == (
        "http://b",
        Code.MODEL,
        "'/models/other'",
    )


def test_two_versions_of_one_engine_are_named_two_engines_are_not():
    newer = view(rank=Rank("http://b"), facts=facts(version="0.33.0"))
    sglang = view(rank=Rank("http://c"), facts=facts(engine="sglang", version="0.5.23"))
    [finding] = check_all([view(), newer, sglang])
    assert (finding.worker, finding.code) == ("http://b", Code.ENGINE_VERSION)


def test_what_a_worker_said_before_it_went_down_is_not_held_against_it():
    down = view(down_because="gone", facts=facts(block_size=32), models={"m": "/other"})
    assert [finding.code for finding in check_all([view(rank=Rank("http://b")), down])] == [
        "worker_down"
    ]
