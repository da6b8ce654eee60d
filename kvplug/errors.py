"""The errors that kvplug raises.

KvplugError
├── ConfigError        a setting, a flag or an argument is wrong
├── HashingError       tokens cannot be hashed (an id outside u32, a key that the scheme has not)
├── DecodeError        bytes from an event socket are no event batch at all
├── RoutingError       a request cannot be routed
│   ├── NoWorkerError      no worker can take it now
│   ├── UnknownRequestError    a request id that is not in flight
│   ├── UnknownRankError       a rank that is not in the fleet
│   ├── WorkerLostError        a worker went away before its answer was complete
│   └── RequestRefusedError    a worker refuses the request, as any other would
├── IndexCorruptError  BlockIndex.check() found an invariant broken: our mistake, never yours
├── SnapshotError      a snapshot could not be written, or a file is not one that can be used
├── TokenizerError     the tokenizer or the chat template refused the text
└── TransportError     a socket could not be opened or used

Each message says what was attempted, what was expected and what came.
"""


class KvplugError(Exception):
    """The root: `except KvplugError` catches everything that kvplug raises on purpose."""


class ConfigError(KvplugError):
    """A setting, a flag or an argument is wrong."""


class HashingError(KvplugError):
    """Tokens cannot be hashed."""


class DecodeError(KvplugError):
    """Bytes from an event socket are no event batch at all."""


class RoutingError(KvplugError):
    """A request cannot be routed."""


class NoWorkerError(RoutingError):
    """No worker can take the request now; `constraint` names what left nobody: "model", "workers",
    "worker", "dp_rank", "required_taints", "busy", "moe_query" (kvplug/router/constraints.py).
    """

    def __init__(self, message: str, *, constraint: str = "workers") -> None:
        super().__init__(message)
        self.constraint = constraint


class UnknownRequestError(RoutingError):
    """A request id that is not in flight."""


class UnknownRankError(RoutingError):
    """A rank that is not in the fleet, or that an index does not follow."""


class WorkerLostError(RoutingError):
    """A worker went away, or cannot be reached, before its answer was complete."""


class RequestRefusedError(RoutingError):
    """A worker refuses the request for what it is, so that it is sent to no other one."""


class IndexCorruptError(KvplugError):
    """An invariant of the index is broken."""


class SharedMemoryError(KvplugError):
    """There is no memory for arrays that several processes share."""


class SnapshotError(KvplugError):
    """A snapshot could not be written, or a file is not one that can be used."""


class TokenizerError(KvplugError):
    """The tokenizer or the chat template refused the text."""


class TransportError(KvplugError):
    """A socket could not be opened or used."""
