"""Names on NATS: subjects, the stream, buckets; which publisher a subject is of.

    kvplug.FLEET.kv.WORKER.RANK     hellos and events, which the stream keeps
    kvplug.FLEET.beat.WORKER.RANK   a hello every 2 s, which nobody keeps
    kvplug.FLEET.ask.WORKER.RANK    asks, with an inbox for the answer
    kvplug.FLEET.sync.ROUTER        the load that a router replica has made
    kvplug.FLEET.replica.ROUTER     that a router replica is there, every 2 s
    kvplug.FLEET.mark               nothing; the stream keeps it, so that its number rises

WORKER and ROUTER are percent-encoded, so that each is one token of a subject.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import quote, unquote

SEQ_HEADER: Final = "Kvplug-Seq"
"""Of a beat: where in the stream its publisher's last acknowledged message is."""

PUBLISHER_HEADER: Final = "Kvplug-Publisher"
"""Of a beat: who says it. Of two publishers of one name the greater one speaks."""

NUMBER_HEADER: Final = "Kvplug-Number"
"""Of a payload that has no number of its own: its number; -1 ends an answer."""

_DEPTH: Final = 5


class PublisherName(NamedTuple):
    """A worker, as its publisher and the router both call it, and a data-parallel rank."""

    worker: str
    rank: int

    def __str__(self) -> str:
        return f"{token_of(self.worker)}/{self.rank}"

    @classmethod
    def parse(cls, text: str) -> PublisherName | None:
        """From `WORKER/RANK`, percent-encoded; None for anything else."""
        worker, slash, rank = text.rpartition("/")
        if not slash or not worker or not _is_number(rank):
            return None
        return cls(unquote(worker), int(rank))


class Subjects:
    """Of one fleet."""

    def __init__(self, fleet: str) -> None:
        self.fleet = fleet
        self.stream = f"kvplug-{fleet}"
        """Of events."""
        self.state_bucket = f"kvplug-{fleet}-state"
        """Key-value bucket of the manifest of snapshots and the lease on making one."""
        self.snapshot_bucket = f"kvplug-{fleet}-snapshots"
        """Object store of the snapshots."""
        self.all_events = f"kvplug.{fleet}.kv.>"
        self.all_beats = f"kvplug.{fleet}.beat.>"
        self.marks = f"kvplug.{fleet}.mark"
        self.all_sync = f"kvplug.{fleet}.sync.*"
        self.all_replicas = f"kvplug.{fleet}.replica.*"

    def events(self, publisher: PublisherName) -> str:
        """Where a publisher's events go."""
        return self._of("kv", publisher)

    def beats(self, publisher: PublisherName) -> str:
        """Where it shows every 2 s that it lives."""
        return self._of("beat", publisher)

    def asks(self, publisher: PublisherName) -> str:
        """Where it is asked."""
        return self._of("ask", publisher)

    def sync(self, router_id: str) -> str:
        """Where a router replica says what it has sent to whom."""
        return f"kvplug.{self.fleet}.sync.{token_of(router_id)}"

    def replica(self, router_id: str) -> str:
        """Where a router replica says that it is there."""
        return f"kvplug.{self.fleet}.replica.{token_of(router_id)}"

    def _of(self, kind: str, publisher: PublisherName) -> str:
        return f"kvplug.{self.fleet}.{kind}.{token_of(publisher.worker)}.{publisher.rank}"


def publisher_of(subject: str) -> PublisherName | None:
    """Whose events, beats or asks these are; None for another subject."""
    parts = subject.split(".")
    if len(parts) != _DEPTH or parts[0] != "kvplug" or not _is_number(parts[4]):
        return None
    return PublisherName(unquote(parts[3]), int(parts[4]))


def token_of(text: str) -> str:
    """As one token of a subject: without dots, blanks and wildcards."""
    return quote(text, safe="").replace(".", "%2E").replace("~", "%7E")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6
