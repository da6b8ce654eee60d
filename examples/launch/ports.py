"""Free ports for servers that are about to start.

In:  how many.   Out: that many ports on which nobody listens.

They are taken from below the range that the kernel gives to outgoing connections: an engine takes
half a minute to start, and a restarted one wants its old port back; a port from that range could
be somebody's connection by then. For the same reason a process never gets a port twice.
"""

import random
import socket
from pathlib import Path

FIRST_PORT = 10_000
OUTGOING_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_given_away: set[int] = set()


def free_ports(num_ports: int) -> list[int]:
    """Different ports, chosen at random so that two runs hardly ever want the same."""
    candidates = sorted({*range(FIRST_PORT, _first_outgoing_port())} - _given_away)
    random.shuffle(candidates)
    free = (port for port in candidates if _is_free(port))
    ports = [next(free) for _ in range(num_ports)]
    _given_away.update(ports)
    return ports


def _first_outgoing_port() -> int:
    first, _last = OUTGOING_RANGE.read_text().split()
    # A machine that gives all ports to outgoing connections leaves no better place than the usual.
    return max(int(first), FIRST_PORT + 20_000)


def _is_free(port: int) -> bool:
    # On all interfaces: vLLM's event socket can be bound only there.
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
