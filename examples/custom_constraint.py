"""A rule of your own: a tenant has at most two requests in flight on each worker.

Run it: python -m examples.custom_constraint

The cost function of the router cannot be replaced. What you can do is narrow its choice, request
by request, with `workers=`. Among the workers that your rule allows, the router takes the one with
the lowest cost.
"""

from collections import Counter

from kvplug import Decision, Router

WORKERS = {"a", "b"}
LIMIT = 2


class Gateway:
    """route and finish, as of a Router, with a tenant."""

    def __init__(self) -> None:
        self.router = Router()
        for worker in WORKERS:
            self.router.add_worker(worker)
        self._in_flight: Counter[tuple[str, str]] = Counter()

    def route(self, tenant: str, prompt: list[int]) -> Decision:
        """NoWorkerError if the tenant has as many requests as it may."""
        allowed = {worker for worker in WORKERS if self._in_flight[tenant, worker] < LIMIT}
        decision = self.router.route(prompt, workers=allowed)
        self._in_flight[tenant, decision.rank.worker] += 1
        return decision

    def finish(self, tenant: str, decision: Decision) -> None:
        """The request is over."""
        self._in_flight[tenant, decision.rank.worker] -= 1
        self.router.finish(decision.request_id)


def main() -> None:
    """Four requests with one prefix: the third and the fourth leave the worker that has it."""
    gateway = Gateway()
    for number in range(2 * LIMIT):
        decision = gateway.route("acme", [*range(1000), number])
        print(f"request {number}: {decision.rank}, {decision.cached_tokens} tokens cached")


if __name__ == "__main__":
    main()
