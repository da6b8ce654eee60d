"""How long a replica calls blocks EXACT that are wrong, sampled while faults occur.

In:  engines and replicas of a run.   Out: the last sample, the longest wrong time.

A sample asks each engine for what it holds, then each replica, then each engine again. A block is
wrong where its rank is called EXACT, if the replica has it and the engine held it neither before
nor after, or the other way round: what is in flight is left out only as far as one sample is long.
It has been wrong since the sample before the first one in which it was. A replica that is paused or
dead says nothing, so its times begin anew; a dead engine holds nothing.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Seen:
    """A replica's view of an engine, beside the engine's own."""

    level: str
    reason: str | None
    fix: str | None
    num_held: int
    only_in_engine: int
    only_in_index: int

    @property
    def is_right(self):
        return self.level == "exact" and not self.num_apart

    @property
    def num_apart(self):
        return self.only_in_engine + self.only_in_index


@dataclass(frozen=True, slots=True)
class Wrong:
    """The longest time of a block; `what` tells of it."""

    seconds: float
    what: str


NONE_WRONG = Wrong(0.0, "")


class Sampler:
    """A context manager: samples in a thread. seen: (replica, engine) to Seen; num_samples."""

    def __init__(self, engines, replicas):
        """`engines`: a callable, as an engine may get a namesake that speaks for it."""
        self._engines, self._replicas = engines, replicas
        self.seen, self.num_samples, self.longest = {}, 0, NONE_WRONG
        self._since, self._looked_at, self._starts = {}, {}, {}
        self._longest_gap_s = 0.0
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._error = None
        self._asking = ThreadPoolExecutor()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join()
        self._asking.shutdown()

    def begin_anew(self):
        """Of the next fault: nothing was wrong yet."""
        with self._changed:
            self.longest, self._longest_gap_s = NONE_WRONG, 0.0
            self._since.clear()

    def next_samples(self, num_samples=2):
        """Wait for samples that began from now on."""
        with self._changed:
            end = self.num_samples + num_samples
            assert self._changed.wait_for(lambda: self._error or self.num_samples >= end, 120)
        if self._error:
            raise self._error

    def _run(self):
        try:
            while not self._stopping.wait(_PAUSE_S):
                self._sample()
        except Exception as error:  # noqa: BLE001 - raised where samples are waited for
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _sample(self):
        engines = self._engines()
        urls = [each.url for each in engines]
        before = dict(zip(urls, self._asking.map(_held, engines), strict=True))
        looks = dict(zip(self._replicas, self._asking.map(_look, self._replicas), strict=True))
        after = dict(zip(urls, self._asking.map(_held, engines), strict=True))
        with self._changed:
            self.seen = {}
            for replica, (num_starts, look, at) in looks.items():
                self._note_start(replica, num_starts if look is not None else None)
                for each in engines:
                    self._compare(replica, each, look, before[each.url], after[each.url], at)
                if replica in self._looked_at and look is not None:
                    gap_s = at - self._looked_at[replica]
                    self._longest_gap_s = max(self._longest_gap_s, gap_s)
                self._looked_at[replica] = at
            self.num_samples += 1
            self._changed.notify_all()

    def _note_start(self, replica, num_starts):
        """Whoever was away, or is another process now, was not wrong before."""
        if num_starts is None or self._starts.get(replica) != num_starts:
            self._since = {key: at for key, at in self._since.items() if key[0] is not replica}
            self._looked_at.pop(replica, None)
        self._starts[replica] = num_starts

    def _compare(self, replica, engine, look, before, after, at):
        if look is None or engine.url not in look or before is None or after is None:
            return
        said = look[engine.url]
        known = set(said["blocks"])
        missing, surplus = (before & after) - known, known - before - after
        self.seen[replica.name, engine.name] = Seen(
            said["level"], said["reason"], said["fix"], len(after), len(missing), len(surplus)
        )
        # A block that is missing, known, and evicted before it is looked at again, was right.
        wrong = {("missing", each) for each in missing} | {("surplus", each) for each in surplus}
        wrong = wrong if said["level"] == "exact" else set()
        self._note_wrong(replica, engine, wrong, at)

    def _note_wrong(self, replica, engine, wrong, at):
        is_theirs = replica, engine.url
        for key in [key for key in self._since if key[:2] == is_theirs and key[2] not in wrong]:
            del self._since[key]
        began_at = self._looked_at.get(replica, at)
        for block in wrong:
            since = self._since.setdefault((*is_theirs, block), began_at)
            if at - since > self.longest.seconds:
                what = f"{len(wrong)} blocks of {engine.name} on {replica.name}"
                what += f", samples up to {self._longest_gap_s:.1f} s apart"
                self.longest = Wrong(at - since, what)


def _held(engine):
    return engine.held()


def _look(replica):
    return replica.num_starts, replica.look(), time.monotonic()
