"""One function per cause: what is wrong with a worker, by what is known of it.

In:  the views of all ranks.   Out: findings. Pure: nothing is asked, logged or remembered.

A worker that is down has that one finding; what it said before is not held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from urllib.parse import unquote

from kvplug.audit.contradictions import Blocks, Scope
from kvplug.audit.ledger import RankLedger
from kvplug.index.apply_result import RejectReason
from kvplug.protocol import MAJOR
from kvplug.server.diagnosis.finding import Code, Finding
from kvplug.server.diagnosis.view import WorkerView

Found = Iterator[Finding]

# So many answers without a trace of their prompts in the index are no chance and no delay.
_MIN_PROMPTS = 8
_MIN_SILENT = 3
_MIN_OTHER_COUNTS = 3
_MAX_OTHER_COUNTS = 0.01
_MIN_AUDITED = 200
_MAX_INCORRECT = 0.01

_OTHER_VERSION = "unsupported_version"
_SKIPS_OF_THEIR_OWN = {
    RejectReason.BLOCK_SIZE.value,
    RejectReason.UNKNOWN_PARENT.value,
    RejectReason.REFUSED_TIER.value,
    _OTHER_VERSION,
}
# Understood and left out on purpose, or answered by following on.
_HARMLESS_SKIPS = {
    "duplicate",
    RejectReason.UNKNOWN_BLOCK.value,
    RejectReason.GROUP_TIER.value,
    RejectReason.ADAPTER_RELOADED.value,
}


def check_all(views: Sequence[WorkerView]) -> list[Finding]:
    """The findings of a fleet, by worker and then by code."""
    up = [view for view in views if view.down_because is None]
    workers = [view for view in views if view.rank.dp_rank == 0]
    found = [_worker_down(view) for view in workers if view.down_because is not None]
    found += [finding for view in up for check in _checks_of(view) for finding in check(view)]
    workers = [view for view in workers if view.down_because is None]
    found += [finding for compare in _OF_FLEET for finding in compare(workers)]
    return sorted(found, key=lambda finding: (finding.worker, finding.code))


def _checks_of(view: WorkerView) -> _Checks:
    checks = _OF_RANK if view.rank.dp_rank else _OF_RANK + _OF_WORKER
    return _OF_EVENTS + checks if view.uses_events else checks


def _worker_down(view: WorkerView) -> Finding:
    if not view.is_found:
        seen, _, fix = str(view.down_because).partition("; ")
        return Finding(view.name, Code.WORKER_UNKNOWN, "the URL of its API", seen, fix)
    fix = "start the engine, or take the worker out of the router's --worker list"
    if str(view.down_because).startswith("401"):
        fix = "put the engine's key into a file and name it with --worker-api-key-file"
    return Finding(view.name, Code.WORKER_DOWN, "an answer", str(view.down_because), fix)


def _events(view: WorkerView) -> Found:
    """Whether the way of the events is open at all."""
    if view.facts.publishes is False:
        fix = f"start the engine with --kv-events-config '{_config(view)}'"
        yield Finding(view.name, Code.EVENTS_OFF, "KV events", "an engine without", fix)
    elif view.events is None and view.unreached is not None:
        seen = f"{view.unreached}, which is not reached from the router's machine"
        fix = (
            "have the engine publish at an address of its machine (tcp://*:5557 with a stock "
            "publisher, tcp://0.0.0.0:5557 with kvplug's), or name one with events="
        )
        yield Finding(view.name, Code.NO_EVENT_ENDPOINT, "an events endpoint", seen, fix)
    elif view.events is None:
        fix = "add ,events=tcp://HOST:PORT to its --worker, the engine's events endpoint"
        yield Finding(view.name, Code.NO_EVENT_ENDPOINT, "an events endpoint", "none", fix)
    elif view.stream is not None and not view.stream.connected:
        fix = (
            "compare events= with the endpoint in the engine's --kv-events-config; stock vLLM "
            "binds only an address with a `*`, and connects to any other; or the publisher "
            "requires keys (--events-key-file)"
        )
        if view.events.startswith("nats://"):
            name, _, rank = view.events.removeprefix("nats://").rpartition("/")
            fix = (
                "start the engine with KVPLUG_NATS and KVPLUG_NATS_FLEET as the router's --nats "
                f"and --nats-fleet, and KVPLUG_NATS_WORKER={unquote(name)} (this is rank {rank}); "
                "or name what it is called there with topic="
            )
        elif view.has_keys:
            fix = (
                "only publishers with the key in --events-server-key are followed, so give the "
                "engine's kvplug its secret key; a stock publisher has none: follow it without keys"
            )
        yield Finding(view.name, Code.EVENTS_DISCONNECTED, view.events, "no connection", fix)


def _config(view: WorkerView) -> str:
    if view.facts.engine == "sglang":
        return '{"publisher": "zmq", "endpoint": "tcp://*:5557", "format": "dynamo"}'
    config = '"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"'
    return f"{{{config}}}"


def _topic(view: WorkerView) -> Found:
    if view.events and not (view.facts.topic or "").startswith(view.topic) and view.facts.publishes:
        seen = f"topic {view.facts.topic or ''!r}"
        fix = "give topic= a prefix of the engine's topic, or leave it out"
        yield Finding(view.name, Code.TOPIC, f"a topic that begins {view.topic!r}", seen, fix)


def _no_events(view: WorkerView) -> Found:
    """Requests were answered, and the stream is open and silent."""
    stream, num_prompts = view.stream, _num_prompts_unseen(view.ledger)
    if stream is None or not stream.connected or stream.num_messages or not num_prompts:
        return
    seen = f"none after {num_prompts} answered requests"
    fix = (
        "check that the endpoint is this engine's, that its topic begins with topic=, and that "
        "prefix caching is on"
    )
    yield Finding(view.name, Code.NO_EVENTS, "KV events", seen, fix)


def _never_matches(view: WorkerView) -> Found:
    """Blocks are stored, but never those of the requests that were sent.

    Where a rank is not followed, they may be there; then it is that rank which is the finding.
    """
    stream, num_prompts = view.stream, _num_prompts_unseen(view.ledger)
    if stream is None or not stream.num_stored or not num_prompts or _lacks_ranks(view):
        return
    seen = f"{stream.num_stored} blocks stored, none of {num_prompts} prompts among them"
    fix = (
        "the engine hashes or tokenizes what the router does not see: check tokenizer, chat "
        "template, LoRA adapters, salts (cache_salt, extra_key), and whether the events endpoint "
        "is another engine's"
    )
    yield Finding(view.name, Code.NEVER_MATCHES, "blocks of its requests", seen, fix)


def _num_prompts_unseen(ledger: RankLedger | None) -> int:
    """How many prompts in a row left no block in the index; 0 if any did, or too few came."""
    if ledger is None or any(ledger.was_stored) or len(ledger.was_stored) < _MIN_PROMPTS:
        return 0
    return len(ledger.was_stored)


def _incomplete(view: WorkerView) -> Found:
    if view.stream is None or not view.stream.connected or view.stream.incomplete is None:
        return
    if any(_contradicted(view)):  # which is why
        return
    seen, fix = view.stream.incomplete, view.stream.fix
    yield Finding(view.name, Code.EVENTS_INCOMPLETE, "all of its events", seen, fix)


def _skipped(view: WorkerView) -> Found:
    if view.stream is None:
        return
    named = _SKIPS_OF_THEIR_OWN | _HARMLESS_SKIPS
    skipped = {reason: n for reason, n in view.stream.skipped.items() if n and reason not in named}
    if skipped:
        seen = ", ".join(f"{reason}: {count}" for reason, count in sorted(skipped.items()))
        fix = "docs/troubleshooting.md says what each reason means; the log names the first of each"
        yield Finding(view.name, Code.EVENTS_SKIPPED, "events that can be used", seen, fix)


def _protocol_version(view: WorkerView) -> Found:
    if view.stream is not None and view.stream.skipped[_OTHER_VERSION]:
        expected, seen = f"version {MAJOR} of kvplug's wire format", "another version"
        fix = "install the same release of kvplug in the engine and the router"
        yield Finding(view.name, Code.PROTOCOL_VERSION, expected, seen, fix)


def _replay_off(view: WorkerView) -> Found:
    if view.stream is not None and view.stream.answers:
        return
    if view.facts.publishes and view.facts.replays is False:
        fix = 'add "replay_endpoint": "tcp://*:6557" to the engine\'s --kv-events-config'
        seen = "none: what is lost, or was said before the router came, stays unknown"
        yield Finding(view.name, Code.REPLAY_OFF, "a replay endpoint", seen, fix)
    elif view.facts.replays and view.stream is not None and not view.stream.can_replay:
        fix = "add replay=ENDPOINT, the engine's replay_endpoint, to its --worker"
        seen = "one, which the router was not told of"
        yield Finding(view.name, Code.REPLAY_OFF, "a replay endpoint that is used", seen, fix)


def _event_format(view: WorkerView) -> Found:
    if view.stream is not None and view.stream.names_extra_keys:
        return
    if view.facts.publishes and view.facts.event_format not in (None, "dynamo"):
        seen = f"{view.facts.event_format}, which gives equal names to blocks of different keys"
        fix = 'add "format": "dynamo" to the engine\'s --kv-events-config'
        yield Finding(view.name, Code.EVENT_FORMAT, "format dynamo", seen, fix)


def _block_size(view: WorkerView) -> Found:
    rejected = view.stream.skipped[RejectReason.BLOCK_SIZE.value] if view.stream else 0
    size = view.facts.block_size
    is_equal = size in (None, view.block_size) and not rejected
    if view.block_size is None or is_equal:
        return
    seen = f"{size}" if size not in (None, view.block_size) else "blocks of another size"
    if rejected:
        seen += f", {rejected} blocks refused"
    flag = "--page-size" if view.facts.engine == "sglang" else "--block-size"
    fix = f"start the router with --block-size {size or 'of the engine'}, or the engine with "
    fix += f"{flag} {view.block_size}"
    yield Finding(view.name, Code.BLOCK_SIZE, f"blocks of {view.block_size} tokens", seen, fix)


def _cache_capacity(view: WorkerView) -> Found:
    size = view.cache_size
    if size.problem is not None:
        learned = f"{size.capacity:g} blocks" if size.capacity else "nothing so far"
        fix = f"the router goes by what evictions tell, {learned}; check the engine's cache "
        fix += "settings, and that events= is this engine's endpoint"
        expected = "a capacity that its blocks fit into"
        yield Finding(view.name, Code.CACHE_CAPACITY, expected, size.problem, fix)


def _prefix_caching(view: WorkerView) -> Found:
    if view.facts.caches is False:
        fix = "start the engine with --enable-prefix-caching"
        if view.facts.engine == "sglang":
            fix = "start the engine without --disable-radix-cache"
        yield Finding(view.name, Code.PREFIX_CACHING_OFF, "prefix caching", "off", fix)


def _hash_mismatch(view: WorkerView) -> Found:
    if view.hashes_alone:
        fix = (
            "routing is right all the same, at more memory; to have one hash space, start all "
            "engines with one --prefix-caching-hash-algo and one PYTHONHASHSEED"
        )
        expected = "the engine hashes of the other workers"
        yield Finding(view.name, Code.HASH_MISMATCH, expected, "others for equal blocks", fix)


def _tokenizer(view: WorkerView) -> Found:
    """By a text that both tokenized, and by what the engine counts in requests."""
    fix = "give --tokenizer the folder of the model that this engine serves, chat template and all"
    if view.tokenization is not None:
        both = (view.tokenization.ours, view.tokenization.theirs)
        yield Finding(view.name, Code.TOKENIZER, *both, fix)
    elif view.ledger is not None and _counts_too_often_otherwise(view.ledger):
        ours, theirs = view.ledger.last_counts
        share = f"{sum(view.ledger.counts_differ)} of {len(view.ledger.counts_differ)}"
        expected, seen = f"a prompt of {ours} tokens", f"{theirs} tokens; {share} requests differ"
        yield Finding(view.name, Code.TOKENIZER, expected, seen, fix)


def _counts_too_often_otherwise(ledger: RankLedger) -> bool:
    num_other = sum(ledger.counts_differ)
    share = num_other / len(ledger.counts_differ) if ledger.counts_differ else 0.0
    return num_other >= _MIN_OTHER_COUNTS and share > _MAX_OTHER_COUNTS


def _no_tokenizer(view: WorkerView) -> Found:
    for model in sorted(view.untokenized & view.models.keys()):
        seen = f"none for model {model!r}: its text is routed by load alone"
        fix = "give --tokenizer a folder with tokenizer.json and the chat template"
        yield Finding(view.name, Code.NO_TOKENIZER, "a tokenizer", seen, fix)
        return


def _data_parallel(view: WorkerView) -> Found:
    if _lacks_ranks(view):
        fix = "leave dp_size= out, or say how many ranks the engine has; restart the router if the "
        fix += "engine changed its number of ranks while it ran"
        expected = f"{view.num_ranks} data-parallel rank(s)"
        yield Finding(view.name, Code.DATA_PARALLEL, expected, str(view.facts.num_ranks), fix)


def _lacks_ranks(view: WorkerView) -> bool:
    """Whether the engine has other ranks than those that are followed."""
    return (view.facts.num_ranks or view.num_ranks) != view.num_ranks


def _cached_tokens(view: WorkerView) -> Found:
    num_silent = view.ledger.num_silent if view.ledger else 0
    if view.facts.reports_cached is not False and num_silent < _MIN_SILENT:
        return
    flag = "--enable-prompt-tokens-details"
    if view.facts.engine == "sglang":
        flag = "--enable-cache-report"
    seen = "a usage without: the router's predictions cannot be audited"
    fix = f"start the engine with {flag}"
    yield Finding(view.name, Code.NO_CACHED_TOKENS, "cached tokens in the usage", seen, fix)


def _incorrect_routing(view: WorkerView) -> Found:
    ledger = view.ledger
    if ledger is None or ledger.num_audited < _MIN_AUDITED:
        return
    if ledger.incorrect_rate > _MAX_INCORRECT:
        seen = f"{ledger.incorrect_rate:.1%} of the last audited requests had fewer cached tokens"
        fix = "see its other findings; kvplug_audited_total says whether events or timing is wrong"
        if not view.uses_events:
            fix = "lower --approximate-ttl-s, or go by KV events (leave out --no-kv-events)"
        expected = f"at most {_MAX_INCORRECT:.0%} incorrectly routed"
        yield Finding(view.name, Code.INCORRECT_ROUTING, expected, seen, fix)


def _contradicted(view: WorkerView) -> Found:
    """The engine reuses again and again less than the index has of it."""
    ledger = view.ledger
    if ledger is None:
        return
    for scope in ledger.contradictions:
        num_wrong, num_all = ledger.contradictions.counts(scope)
        seen = f"fewer in {num_wrong} of the last {num_all} requests that counted on {scope}"
        expected = "as many cached tokens as its events say"
        yield Finding(view.name, Code.CONTRADICTED, expected, seen, _fix_of(scope, ledger))
        return


def _fix_of(scope: Scope, ledger: RankLedger) -> str:
    if scope.blocks is Blocks.TIER:
        return (
            "its blocks in host memory and on disk do not count any more; give the connector "
            "chunks of one block (docs/events.md)"
        )
    if 2 * sum(ledger.was_stored) < len(ledger.was_stored):
        return "its events are another engine's: check events= and the engine's port"
    return (
        "blocks of a KV cache group (a window, states) may be missing in its events: start vLLM "
        "with --disable-hybrid-kv-cache-manager; until then load alone counts"
    )


def _models_differ(views: Sequence[WorkerView]) -> Found:
    """One name, several models: prefixes of one are no use on the other."""
    roots: dict[str, tuple[str, str]] = {}
    for view in views:
        for model, root in view.models.items():
            first_worker, first = roots.setdefault(model, (view.worker, root))
            if PurePosixPath(root).name != PurePosixPath(first).name:
                expected = f"model {model!r} loaded from {first!r}, as on {first_worker}"
                fix = "give different models different names (--served-model-name)"
                yield Finding(view.worker, Code.MODEL, expected, repr(root), fix)


def _versions_differ(views: Sequence[WorkerView]) -> Found:
    firsts: dict[str, WorkerView] = {}
    for view in views:
        if view.facts.version is None:
            continue
        first = firsts.setdefault(view.facts.engine, view)
        if first.facts.version != view.facts.version:
            expected = f"{view.facts.engine} {first.facts.version}, as on {first.worker}"
            fix = "run one version, or take the finding for a note while you upgrade"
            yield Finding(view.worker, Code.ENGINE_VERSION, expected, view.facts.version, fix)


_Checks = tuple[Callable[[WorkerView], Found], ...]
_OF_EVENTS: _Checks = (
    *(_events, _topic, _no_events, _never_matches, _incomplete, _skipped, _replay_off),
    *(_protocol_version, _event_format, _hash_mismatch, _contradicted),
)
_OF_RANK: _Checks = (_block_size, _cache_capacity, _incorrect_routing)
_OF_WORKER: _Checks = (_prefix_caching, _tokenizer, _no_tokenizer, _data_parallel, _cached_tokens)
_OF_FLEET: tuple[Callable[[Sequence[WorkerView]], Found], ...] = (_models_differ, _versions_differ)
