"""Which engines run when: the pool behind the tests of real engines, with engines that write down
what becomes of them."""

import pytest

from tests.engines.engine_pool import EnginePool, Recipe, uses


class Diary:
    """Recipes by name, and what became of their engines."""

    def __init__(self):
        self.entries, self.num_failures = [], 0

    def recipes(self, names):
        return [Recipe(name, lambda _, name=name: Engine(self, name)) for name in names]

    def since(self, place):
        return self.entries[place:]


class Engine:
    def __init__(self, diary, name):
        self._diary, self._name = diary, name

    def start(self):
        self._diary.entries.append(f"start {self._name}")

    def wait_ready(self):
        if self._diary.num_failures:
            self._diary.num_failures -= 1
            raise TimeoutError(self._name)

    def stop(self):
        self._diary.entries.append(f"stop {self._name}")


class MarkedTest:
    """What the pool asks of pytest's items."""

    def __init__(self, *recipes):
        self._mark = uses(*recipes).mark

    def iter_markers(self, name):
        return [self._mark] if name == self._mark.name else []


@pytest.fixture
def diary():
    return Diary()


def pool_of(tests):
    return EnginePool(tests, new_folder=lambda name: name)


def test_an_engine_is_shared_and_stopped_after_its_last_test(diary):
    a, b = diary.recipes("ab")
    tests = [MarkedTest(a), MarkedTest(a, b), MarkedTest(b)]
    with pool_of(tests) as pool:
        [first] = pool.begin(tests[0])
        pool.end(tests[0])
        again, _ = pool.begin(tests[1])
        assert again is first
        assert "stop a" not in diary.entries
        pool.end(tests[1])
        pool.begin(tests[2])
    assert sorted(diary.entries) == ["start a", "start b", "stop a", "stop b"]


def test_the_next_engines_start_while_a_test_runs_and_no_more(diary):
    recipes = diary.recipes("abcd")
    tests = [MarkedTest(), *map(MarkedTest, recipes)]
    with pool_of(tests) as pool:
        pool.begin(tests[0])
        assert diary.entries == ["start a", "start b"]
        pool.begin(tests[1])
        assert diary.entries == ["start a", "start b", "start c"]
    assert sorted(diary.since(3)) == ["stop a", "stop b", "stop c"]


def test_an_engine_that_does_not_come_up_is_stopped_and_has_another_try(diary):
    [recipe] = diary.recipes("a")
    tests = [MarkedTest(recipe), MarkedTest(recipe)]
    diary.num_failures = 1
    with pool_of(tests) as pool:
        with pytest.raises(TimeoutError):
            pool.begin(tests[0])
        pool.begin(tests[1])
    assert diary.entries.count("start a") == diary.entries.count("stop a") == 2


def test_a_fixture_that_outlives_tests_gets_the_same_engine(diary):
    [recipe] = diary.recipes("a")
    test = MarkedTest(recipe)
    with pool_of([test]) as pool:
        engine = pool.get(recipe)
        assert pool.begin(test) == [engine]
