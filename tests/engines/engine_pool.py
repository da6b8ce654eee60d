"""Engines that several tests share, and that start before their tests begin.

In:  the tests of a run in their order, each marked with the recipes of the engines that it uses.
Out: engines that serve. Each starts while an earlier test runs, and stops after its last test.

An engine takes up to a minute to start and most tests take seconds, so a run that starts each when
it is asked for would mostly wait, for one core of several.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import pytest

# Two at a time keep two cores busy; more would only make each of them slower.
NUM_AHEAD = 2


class Engine(Protocol):
    """Whatever takes a while to start: a server, or a program whose result a test looks at."""

    def start(self): ...

    def wait_ready(self): ...

    def stop(self): ...


@dataclass(frozen=True, eq=False)
class Recipe:
    """make(folder): an engine that is not started yet; two tests with one recipe share one."""

    name: str
    make: Callable[[Path], Engine]


def uses(*recipes):
    """The mark of a test (or of a parameter, or of a module) that needs these engines."""
    return pytest.mark.uses(*recipes)


def recipes_of(test):
    return [recipe for mark in test.iter_markers("uses") for recipe in mark.args]


class EnginePool:
    """A context manager; `begin` and `end` each test."""

    def __init__(self, tests, new_folder):
        self._place_of = {test: place for place, test in enumerate(tests)}
        self._recipes = [recipes_of(test) for test in tests]
        self._new_folder = new_folder
        self._running, self._taken = {}, set()
        self._stopping, self._stops = ThreadPoolExecutor(), []

    def begin(self, test):
        """The engines that the test uses, once they serve; those of later tests are started."""
        recipes = self._recipes[self._place_of[test]]
        for recipe in (*recipes, *self._ahead_of(test)):
            self._start(recipe)
        return [self.get(recipe) for recipe in recipes]

    def get(self, recipe):
        """One engine, once it serves; for fixtures that outlive a test which uses it."""
        engine = self._start(recipe)
        if recipe not in self._taken:
            self._wait_ready(recipe, engine)
        return engine

    def end(self, test):
        """Stop what no later test uses."""
        for recipe in {*self._recipes[self._place_of[test]]} - {*self._later_than(test)}:
            self._stop(recipe)

    def _later_than(self, test):
        return chain.from_iterable(self._recipes[self._place_of[test] + 1 :])

    def _ahead_of(self, test):
        begun = self._taken.union(self._recipes[self._place_of[test]])
        later = dict.fromkeys(self._later_than(test))
        return [recipe for recipe in later if recipe not in begun][:NUM_AHEAD]

    def _start(self, recipe):
        if recipe not in self._running:
            engine = recipe.make(self._new_folder(recipe.name))
            self._running[recipe] = engine
            engine.start()
        return self._running[recipe]

    def _wait_ready(self, recipe, engine):
        try:
            engine.wait_ready()
        except BaseException:
            self._stop(recipe)  # the next test has another try
            raise
        self._taken.add(recipe)

    def _stop(self, recipe):
        """In the background: an engine may take seconds to end, and the next test need not wait."""
        self._taken.discard(recipe)
        self._stops.append(self._stopping.submit(self._running.pop(recipe).stop))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for recipe in list(self._running):
            self._stop(recipe)
        with self._stopping:
            for stop in self._stops:
                stop.result()
