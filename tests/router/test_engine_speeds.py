import random

import pytest

from kvplug import EngineModel, Rank, Router, RouterConfig

FAST, SLOW = EngineModel(token_ms=0.02), EngineModel(token_ms=0.1)


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def make_router(clock, **models):
    router = Router(RouterConfig(block_size=16, speculative_ttl_s=0.0), clock=clock)
    for worker, model in models.items():
        router.add_worker(worker, model=model)
    return router


def serve(router, clock, worker, model, num_tokens, answer=10):
    """One request, alone on an engine that is as fast as the model says."""
    tokens = [random.randrange(10_000)] * num_tokens
    decision = router.route(tokens, workers=[worker])
    clock.now_s += 1e-3 * (model.fixed_ms + model.token_ms * num_tokens)
    router.first_token(decision.request_id)
    clock.now_s += 1e-3 * (answer - 1) * (model.step_ms + model.sequence_ms)
    router.finish(decision.request_id, answer)
    return decision


def test_what_an_engine_takes_is_learnt_and_predicted():
    clock = Clock()
    router = make_router(clock, a="m")
    for number in range(100):
        serve(router, clock, "a", FAST, 100 + 37 * number)
    assert router.engine_model(Rank("a")).token_ms == pytest.approx(0.02, rel=0.1)
    predicted = serve(router, clock, "a", FAST, 5000).predicted_ttft_ms
    assert predicted == pytest.approx(2 + 0.02 * 5000, rel=0.1)
    quality = router.model_quality(Rank("a"))
    assert (quality.is_given, quality.num_wholes) == (False, 0)
    assert min(quality.num_first_tokens, quality.num_answers) >= 95  # not of those 5 ms apart
    assert quality.first_token_error < 0.1
    assert quality.prefill_factor == pytest.approx(1.0)


def test_answers_that_come_as_a_whole_do_as_well():
    clock = Clock()
    router = make_router(clock, a="m")
    for number in range(200):
        num_tokens, answer = 100 + 37 * (number % 50), 1 + number % 7
        decision = router.route([number] * num_tokens, reports_first_token=False)
        clock.now_s += 1e-3 * (FAST.fixed_ms + FAST.token_ms * num_tokens)
        clock.now_s += 1e-3 * (answer - 1) * (FAST.step_ms + FAST.sequence_ms)
        router.finish(decision.request_id, answer)
    found = router.engine_model(Rank("a"))
    assert found.token_ms == pytest.approx(0.02, rel=0.1)
    assert found.step_ms + found.sequence_ms == pytest.approx(10.1, rel=0.1)
    assert router.model_quality(Rank("a")).num_wholes == 200


def test_engines_of_different_models_are_learnt_apart():
    clock = Clock()
    router = make_router(clock, small="small", large="large")
    for number in range(100):
        serve(router, clock, "small", FAST, 100 + 37 * number)
        serve(router, clock, "large", SLOW, 100 + 37 * number)
    assert router.engine_model(Rank("small")).token_ms == pytest.approx(0.02, rel=0.1)
    assert router.engine_model(Rank("large")).token_ms == pytest.approx(0.1, rel=0.1)
    router.remove_worker("large")
    assert router.engine_model(Rank("small")).token_ms == pytest.approx(0.02, rel=0.1)


def test_a_model_that_is_given_is_kept():
    clock = Clock()
    router = make_router(clock, a="m", b="m")
    router.set_engine_model(Rank("a"), FAST)
    for number in range(50):
        serve(router, clock, "a", SLOW, 1000 + number)
        serve(router, clock, "b", SLOW, 1000 + number)
    assert router.engine_model(Rank("a")) == FAST
    assert router.model_quality(Rank("a")).is_given
    assert router.engine_model(Rank("b")).token_ms == pytest.approx(0.1, rel=0.2)
    router.add_worker("c", model="m")  # a fleet that changes keeps what is known
    assert router.engine_model(Rank("a")) == FAST
    assert router.engine_model(Rank("c")) == router.engine_model(Rank("b"))
    router.remove_worker("a")
    router.add_worker("a", model="m")
    assert router.engine_model(Rank("a")) != FAST


def test_requests_go_to_the_faster_of_two_unequal_engines():
    clock = Clock()
    router = make_router(clock, fast="m", slow="m")
    for number in range(60):
        serve(router, clock, "fast", FAST, 500 + 37 * number)
        serve(router, clock, "slow", SLOW, 500 + 37 * number)
    for worker in ("fast", "slow"):
        router.set_cache_capacity(Rank(worker), 100_000)
    decisions = [router.route([7_000 + number] * 2000) for number in range(12)]
    num_fast = sum(decision.rank.worker == "fast" for decision in decisions)
    assert 8 <= num_fast < 12
