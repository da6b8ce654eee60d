"""Dynamo's side of `make differential`: SelectionService of ai-dynamo-runtime 1.6.1, in process.

In:  lists of calls, JSON lines.   Out: their answers; a list {"error": text} for one it refuses.

Runs in an environment of its own. The service is fed by sockets, as it takes events in no other
way, and asked through asyncio, as it answers in no other way.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from typing import Any

os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import SelectionService

from tests.benchmarks.sides import serve


class Calls:
    """The methods of one service, by name; `renew` replaces it by an empty one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._service = SelectionService(indexer_threads=1)

    def measure(self, calls: list[list[Any]]) -> list[Any]:
        """[[name, *arguments], ...] one after the other."""
        return self._loop.run_until_complete(self._answers(calls))

    async def _answers(self, calls: list[list[Any]]) -> list[Any]:
        return [await self._answer(name, *arguments) for name, *arguments in calls]

    async def _answer(self, name: str, *arguments: Any) -> Any:
        if name == "renew":
            await self._service.shutdown_async()
            self._service = SelectionService(indexer_threads=1)
            return None
        if name == "add_output_block":
            selection_id, decay_fraction = arguments
            return self._service.add_output_block(selection_id, decay_fraction=decay_fraction)
        try:
            answer = getattr(self._service, name)(*arguments)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:  # noqa: BLE001 - Dynamo's own kinds; its text is the answer
            return {"error": str(error)}


if __name__ == "__main__":
    serve(Calls().measure, sys.stdin)
