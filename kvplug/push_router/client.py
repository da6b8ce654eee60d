"""WorkerClient: how an engine is asked.

In:  a rank, a GenerateRequest.   Out: its tokens as they come, or WorkerLostError.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

from kvplug.events import Rank
from kvplug.push_router.request import GenerateRequest


class Output(NamedTuple):
    """The next tokens of an answer; finish_reason: why it ends, None if it goes on."""

    token_ids: Sequence[int]
    finish_reason: str | None = None


class WorkerClient(Protocol):
    """Asks one engine. Whoever wants no more of an answer closes the generator."""

    def generate(self, rank: Rank, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        """The outputs of the rank's engine; the last one has a finish reason.

        WorkerLostError if the engine cannot be reached, or goes away before its answer ends;
        RequestRefusedError if it does not want the request. When the generator is closed, the
        engine must stop to work on the request.
        """
        ...
