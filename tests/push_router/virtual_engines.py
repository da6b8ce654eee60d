"""Engines in virtual time, which break off where a test says.

In:  requests.   Out: tokens that depend on all tokens before them; a clock that moves.
"""

import zlib
from array import array
from itertools import islice

from kvplug.errors import WorkerLostError
from kvplug.push_router import Output
from kvplug.router.engine_model import EngineModel

NEVER = 10**9


class Clock:
    """Of engines and router, in seconds."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def next_tokens(tokens):
    """What any engine generates after these tokens."""
    digest = zlib.crc32(array("I", tokens).tobytes())
    while True:
        token = digest % 50_000
        yield token
        digest = zlib.crc32(array("I", [token]).tobytes(), digest)


def answer_of(prompt, num_tokens):
    return list(islice(next_tokens(prompt), num_tokens))


class VirtualEngines:
    """A WorkerClient. Of each worker, by name: after how many tokens it is lost (`breaks`), and
    prompts that it can read in a CXL pool (`pooled`).

    Times are those of an EngineModel: a prefill takes time for each token that cannot be read, and
    less for each that can.
    """

    def __init__(self, clock=None, *, block_size=4, chunk=1):
        self.clock, self.model = clock or Clock(), EngineModel()
        self.breaks, self.pooled = {}, {}
        self.asked, self.num_open = [], 0
        self._block_size, self._chunk = block_size, chunk

    async def generate(self, rank, request):
        self.asked.append((rank, request))
        self.num_open += 1
        try:
            self.clock.now_s += self._prefill_s(rank.worker, request.token_ids)
            for output in self._outputs(rank, request):
                yield output
                self.clock.now_s += self.model.step_ms / 1e3
        finally:
            self.num_open -= 1

    def _outputs(self, rank, request):
        left, num_left = next_tokens(request.token_ids), request.stop_conditions.max_tokens
        breaks_in = self.breaks.get(rank.worker, NEVER)
        while True:
            tokens = list(islice(left, min(self._chunk, num_left, breaks_in)))
            num_left, breaks_in = num_left - len(tokens), breaks_in - len(tokens)
            if tokens:
                yield Output(tokens, None if num_left or breaks_in == 0 else "length")
            if breaks_in == 0:
                raise WorkerLostError(f"{rank} has failed")
            if num_left == 0:
                return

    def _prefill_s(self, worker, tokens):
        num_read = max([common(tokens, each) for each in self.pooled.get(worker, ())], default=0)
        num_read -= num_read % self._block_size
        new, model = len(tokens) - num_read, self.model
        return (model.fixed_ms + new * model.token_ms + num_read * model.pool_ms) / 1e3


def common(tokens, others):
    """Length of the common prefix."""
    pairs = enumerate(zip(tokens, others, strict=False))
    differing = (at for at, (token, other) in pairs if token != other)
    return next(differing, min(len(tokens), len(others)))
