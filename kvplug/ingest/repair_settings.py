"""How patient the repair of an event stream is.

In:  numbers.   Out: a frozen object.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairSettings:
    """Times in seconds.

    answer_timeout_s: silence after which a replay has failed; max_tries: failures in a row before
    a pause of pause_s; lost_after_s: an interrupted stream loses its blocks after that;
    max_held_bytes: of live messages that wait for a replay, more are asked for later.
    confirm_after_s: a loss shows only with the next message, and a publisher learns of a
    subscription some time after the connection; so after a silence of this length the engine is
    asked once whether there is more, and then every check_every_s while it stays silent.
    """

    answer_timeout_s: float = 5.0
    max_tries: int = 3
    pause_s: float = 30.0
    lost_after_s: float = 10.0
    max_held_bytes: int = 64 * 2**20
    confirm_after_s: float = 1.0
    check_every_s: float = 30.0
