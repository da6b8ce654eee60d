"""Which workers serve a model: those that are up, not drained, and not ejected.

In:  changes of workers.   Out: candidates for a model; what all of them say of their models.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from kvplug.server.workers.ejection import Ejections
from kvplug.server.workers.model_cards import Cards, ModelTable, Served, joined
from kvplug.server.workers.worker import Worker

logger = logging.getLogger(__name__)


class Serving:
    """models, candidates; note_change of a worker, mark_down. `workers` by name."""

    def __init__(self, workers: Iterable[Worker], ejections: Ejections) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.ejections = ejections
        self._cards: Cards | None = None  # of all, once they are asked for
        self.changed = asyncio.Event()
        """Set when a worker comes, goes, or serves something else; then there is a new one."""
        self.note_change()

    def note_cards(self) -> None:
        """A worker says something else of its models."""
        self._cards = None

    @property
    def may_grow(self) -> bool:
        """Whether a worker may come up that serves what is missing."""
        return not self.workers or not all(worker.is_up for worker in self.workers.values())

    @property
    def models(self) -> Mapping[str, Served]:
        """What the workers that are up serve, by the name that is asked for, in order."""
        return self._table.served

    def cards(self) -> Cards:
        """What the workers that are up say of these models, by name and in order."""
        if self._cards is None:
            self._cards = joined(each.cards for each in self.workers.values() if each.is_up)
        return self._cards

    def served_as(self, model: str) -> Served | None:
        """What is meant by a name that is asked for, or None."""
        return self._table.known.get(model)

    def candidates(self, model: str) -> frozenset[str]:
        """Names of the workers that serve the model: those that are up and not ejected; if none
        is, those that did when they were, as one may be back before it is looked at.
        """
        return self.ejections.usable(self._table.workers(model))

    def tokenizers_of(self, model: str) -> frozenset[str]:
        """The digests of the tokenizers that those workers have, as far as they say so."""
        return self._tokenizers.get(model, frozenset())

    def names_extra_keys(self, model: str) -> bool:
        """Whether all those workers say of which extra_key their blocks are."""
        return model in self._named_extra_keys

    def mark_down(self, name: str, reason: str) -> None:
        """A request could not reach the worker."""
        worker = self.workers.get(name)
        if worker is None:  # it was removed meanwhile
            return
        if worker.is_up:
            logger.warning("worker %s is down: %s", name, reason)
        self.take_down(worker, reason)

    def take_down(self, worker: Worker, reason: str) -> None:
        """It gets no requests until it is up again."""
        was_up, worker.down_because = worker.is_up, reason
        if was_up:
            self.note_change()

    def note_change(self) -> None:
        """A worker came up, went down, or serves something else."""
        up = {name: each.models for name, each in self.workers.items() if each.is_up}
        down = {name: each.models for name, each in self.workers.items() if not each.is_up}
        draining = {name for name, each in self.workers.items() if each.is_draining}
        self._table = ModelTable(up, down, draining)
        self._cards = None
        self.changed.set()
        self.changed = asyncio.Event()
        digests = {name: each.tokenizer for name, each in self.workers.items() if each.tokenizer}
        said = {model: self._table.workers(model) & digests.keys() for model in self._table.known}
        self._tokenizers = {
            model: frozenset(digests[name] for name in names) for model, names in said.items()
        }
        self._named_extra_keys = {
            model
            for model in self._table.known
            if all(self.workers[name].names_extra_keys for name in self._table.workers(model))
        }
