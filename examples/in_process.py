"""The router inside your own program: two engines in the same process, no HTTP and no sockets.

Run it: python -m examples.in_process
"""

from kvplug import Rank, Router
from kvplug.sim.engine import SimulatedEngine

DOCUMENTS = [list(range(1000)), list(range(5000, 6000))]  # token ids
MAX_TOKENS = 8


def main() -> None:
    """Ask three questions about each document, and print where each one goes."""
    router = Router()
    engines = {Rank(name): SimulatedEngine() for name in "ab"}
    for rank in engines:
        router.add_worker(rank.worker)
    for question in range(3):
        for number, document in enumerate(DOCUMENTS):
            prompt = [*document, 9000 + question]
            decision = router.route(prompt, max_tokens=MAX_TOKENS)
            answer(router, decision.request_id, decision.rank, engines[decision.rank], prompt)
            print(f"document {number}: {decision.rank}, {decision.cached_tokens} tokens cached")


def answer(
    router: Router, request_id: str, rank: Rank, engine: SimulatedEngine, prompt: list[int]
) -> None:
    """What a gateway tells the router while an engine answers."""
    request, now_s = engine.submit(prompt, MAX_TOKENS), 0.0
    while step := engine.step(now_s):
        now_s = step.ended_at
        router.apply(rank, step.batch())  # the KV cache events of this step
        if request.num_output_tokens == 1:
            router.first_token(request_id)
    router.finish(request_id, num_tokens=request.num_output_tokens)


if __name__ == "__main__":
    main()
