"""What an engine is asked to send again.

In:  the state of a stream.   Out: an order for whoever owns the sockets; another object is another
request.
"""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class ReplayOrder:
    """What the engine is asked for: its messages from number `start` on.

    asks_everything: from 0, for a state of its own; otherwise `start` is the last message that
    was applied, and proves that it is the same life. is_check: nothing is known to be missing.
    num_waiting: messages that were held when it was asked. The answer is newer than they are.
    """

    start: int
    asks_everything: bool
    began_s: float
    deadline_s: float
    is_check: bool = False
    num_waiting: int = 0
    is_proved: bool = False
