"""Free ports for servers that are about to start.

In:  how many.   Out: that many ports on which nobody listens.

They are taken from below the range that the kernel gives to outgoing connections: an engine takes
half a minute to start, and a restarted one wants its old port back; a port from that range could
be somebody's connection by then. For the same reason a process never gets a port twice. The ports
right behind one go with it, as each data-parallel rank of an engine takes the next. SGLang (0.5.23)
chooses ports of its own between SGLANG_PORTS, and binds them late, so none is from there.
"""

import random
import socket
from pathlib import Path

from examples.launch.errors import LaunchError

FIRST_PORT = 10_000
SGLANG_PORTS = range(22_000, 30_000)
MAX_RANKS = 4
OUTGOING_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_given_away: set[int] = set()


def free_ports(num_ports: int) -> list[int]:
    """Different ports, chosen at random so that two runs hardly ever want the same."""
    return [_free_port() for _ in range(num_ports)]


def _free_port() -> int:
    before = range(FIRST_PORT, _first_outgoing_port() - MAX_RANKS)
    candidates: list[int] = [port for port in before if port not in SGLANG_PORTS]
    random.shuffle(candidates)
    for port in candidates:
        of_ranks = range(port, port + MAX_RANKS)
        if _given_away.isdisjoint(of_ranks) and all(map(_is_free, of_ranks)):
            _given_away.update(of_ranks)
            return port
    raise LaunchError(f"found no {MAX_RANKS} free ports in a row from {FIRST_PORT} on")


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
