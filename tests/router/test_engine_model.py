import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.errors import ConfigError
from kvplug.router.engine_model import Decoding, EngineModel, FitErrors, FleetFit, RidgeFit, Work

TRUTH = EngineModel(
    fixed_ms=4.0, token_ms=0.05, attention_ms=2e-6, host_ms=0.01, disk_ms=0.04, pool_ms=0.02,
    busy_ms=9.0, step_ms=8.0, sequence_ms=0.2, context_ms=1e-4,
)  # fmt: skip


def first_token_ms(model, work):
    pairs = work.new_tokens * (work.cached_tokens + work.new_tokens / 2)
    tokens = model.token_ms * (work.new_tokens + work.ahead_tokens) + model.attention_ms * pairs
    loading = np.dot(work.loaded_tokens, (model.host_ms, model.disk_ms, model.pool_ms))
    return model.fixed_ms + tokens + loading + model.busy_ms * work.is_busy


def observe(fit, random, rank=0, slower=1.0, num_observations=600, outliers=0.0):
    """First tokens and answers of an engine as TRUTH has it, within 5 %; some take far longer."""
    for _ in range(num_observations):
        noise = random.normal(1, 0.05) * (20 if random.random() < outliers else 1)
        loaded = tuple(random.integers(0, 2, 3) * random.integers(0, 3000, 3).astype(float))
        new, cached, ahead = (float(random.integers(1, 8000)) for _ in range(3))
        work = Work(new, cached, ahead, loaded, bool(random.integers(2)))
        work_ms = first_token_ms(TRUTH, work) - TRUTH.fixed_ms - TRUTH.busy_ms * work.is_busy
        rest_ms = TRUTH.fixed_ms + TRUTH.busy_ms * work.is_busy * slower
        fit.observe_first_token(rank, noise * (slower * work_ms + rest_ms), work)
        running, context = float(random.integers(1, 40)), float(random.integers(0, 60_000))
        prefilled = float(random.integers(0, 50))
        step = TRUTH.step_ms + TRUTH.sequence_ms * running + TRUTH.context_ms * context
        between_ms = noise * slower * (step + TRUTH.token_ms * prefilled)
        fit.observe_answer(rank, between_ms, Decoding(running, context, prefilled))


def test_whole_answers_tell_of_prefill_and_decode():
    fit, random = FleetFit(EngineModel()), np.random.default_rng(4)
    for _ in range(600):
        new, steps = float(random.integers(1, 8000)), int(random.integers(0, 200))
        work = Work(new, 0.0, 0.0, (0.0, 0.0, 0.0), False)
        step_ms = TRUTH.step_ms + TRUTH.sequence_ms * 4
        ms = (first_token_ms(TRUTH, work) + steps * step_ms) * random.normal(1, 0.05)
        fit.observe_whole(0, ms, work, steps, Decoding(4.0, 0.0, 0.0))
    found = model_of(fit)
    assert found.token_ms == pytest.approx(TRUTH.token_ms, rel=0.25)
    assert found.step_ms + 4 * found.sequence_ms == pytest.approx(step_ms, rel=0.1)
    assert fit.wholes.share < 0.1


def model_of(fit, rank=0):
    prefill, decode = (np.array([factor]) for factor in fit.factors(rank))
    return EngineModel.from_row(fit.rows(prefill, decode)[0])


@pytest.mark.parametrize(("outliers", "within"), [(0.0, 0.25), (0.05, 0.5)])
def test_the_model_of_an_engine_is_found_from_its_answers(outliers, within):
    fit = FleetFit(EngineModel())
    observe(fit, np.random.default_rng(1), outliers=outliers)
    found = model_of(fit)
    for name in ("token_ms", "attention_ms", "host_ms", "disk_ms", "step_ms", "context_ms"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=within), name
    assert fit.first_tokens.share < 0.1 + 20 * outliers


def test_before_anything_is_observed_the_model_is_the_one_believed():
    assert model_of(FleetFit(TRUTH)).row == pytest.approx(
        [*TRUTH.row[:3], 0.0125, 0.0375, 0.005, *TRUTH.row[6:]]  # loading: shares of computing
    )
    assert math.isnan(FleetFit(TRUTH).first_tokens.share)


def test_equal_engines_are_taken_for_equal_and_a_slow_one_for_slow():
    fit, random = FleetFit(EngineModel()), np.random.default_rng(2)
    for _ in range(60):
        for rank in range(4):
            observe(fit, random, rank, 3.0 if rank == 3 else 1.0, num_observations=3)
    factors = [fit.factors(rank) for rank in range(4)]
    for one in factors[1:3]:
        assert one == pytest.approx(factors[0], rel=0.05)
    for of_slow, of_others in zip(factors[3], factors[0], strict=True):
        assert 1.7 < of_slow / of_others < 3.0  # a fifth either way counts as equal
    fit.forget(3)
    assert fit.factors(3) == (1.0, 1.0)


numbers = st.floats(0, 1e6)


@given(st.lists(st.tuples(st.lists(numbers, min_size=3, max_size=3), numbers), max_size=30))
def test_coefficients_are_finite_and_not_below_zero(observations):
    fit, errors = RidgeFit(np.ones(3), np.ones(3), np.zeros(3, dtype=bool)), FitErrors()
    for features, value in observations:
        fit.add(np.array(features), value, errors)
    assert np.isfinite(fit.coefficients).all()
    assert (fit.coefficients >= 0).all()


def test_signed_coefficients_may_be_below_zero():
    first, second = 5.0, 3.0
    fit, errors = RidgeFit(np.zeros(2), np.full(2, 1e-6), np.array([False, True])), FitErrors()
    for _ in range(5):
        fit.add(np.array([1.0, 0.0]), first + second, errors)
        fit.add(np.array([1.0, 1.0]), first, errors)
    assert fit.coefficients == pytest.approx([first + second, -second], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "5"])
def test_a_model_of_no_numbers_is_rejected(value):
    with pytest.raises(ConfigError, match="token_ms must be a finite number of at least 0"):
        EngineModel(token_ms=value)
