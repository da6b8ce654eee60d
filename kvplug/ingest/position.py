"""How far a follower of one of our publishers has come, which a snapshot has beside the index.

In:  a LifeSequencer between two messages.   Out: the same, so that another one can go on there.
"""

from __future__ import annotations

from msgspec import Struct

from kvplug.protocol import WorkerHello


class FollowerPosition(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """life: of the publisher; next: the number of the first events that are not applied;
    known_next: that of the first events that nobody has spoken of yet: those between are missing;
    is_complete: whether all before `next` is applied; past_lives: oldest first; about: what the
    publisher said of its engine; defect: why events of this life were of no use, if they were not.
    """

    life: int
    next: int
    known_next: int
    is_complete: bool
    past_lives: tuple[int, ...] = ()
    about: WorkerHello | None = None
    defect: str | None = None
