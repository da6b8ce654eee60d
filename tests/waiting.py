"""Waiting for a condition, never for a time."""

import asyncio
import time

POLL_S = 0.02


async def until(condition, what, *, timeout_s=30.0):
    """Wait until the condition holds; fail with `what` if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s in vain until {what}")
        await asyncio.sleep(POLL_S)
    return value
