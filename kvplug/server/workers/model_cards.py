"""What an engine says it serves: models, and LoRA adapters of them.

In:  the answers to GET /v1/models and, as SGLang says there only how it calls its model, to GET
     /server_info.
Out: by the name that a request asks for, what it gets, and
from which workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from kvplug.tokenization.prompt_kind import Engine

_LENGTH: Final = "max_model_len"


class Served(msgspec.Struct, frozen=True):
    """What stands behind a name.

    base: the model; lora_name: the adapter on top of it, "" for none; root: where the engine
    loaded the model from, the folder of the tokenizer that is used with adapters, too; lora_path:
    where it loaded the adapter from; engines: which serve it, as they say who owns the model.
    """

    base: str
    lora_name: str = ""
    root: str = ""
    lora_path: str = ""
    engines: frozenset[Engine] = frozenset([Engine.VLLM])


Models = Mapping[str, Served]
"""What one worker serves, by the name that is asked for."""


Cards = Mapping[str, Mapping[str, Any]]
"""The entries of a worker's /v1/models, by the name that is asked for."""


class ModelTable:
    """What a fleet serves; made anew when a worker comes, goes, or serves something else.

    served: by name, in order, what workers that are up serve; known: what workers that are down
    served, too. Where workers differ, the first one counts, those that are up before the others.
    """

    def __init__(
        self,
        up: Mapping[str, Models],
        down: Mapping[str, Models],
        draining: Collection[str] = (),
    ) -> None:
        """By name, what the workers serve that are up, and what those served that are down; names
        of those that get no new requests.
        """
        self.known: dict[str, Served] = {}
        for models in reversed([*up.values(), *down.values()]):
            for name, served in models.items():
                others = self.known[name].engines if name in self.known else frozenset()
                self.known[name] = replace(served, engines=served.engines | others)
        names = sorted({name for models in up.values() for name in models})
        self.served = {name: self.known[name] for name in names}
        workers = _workers_by_name(down) | _workers_by_name(up)
        self._workers = {name: those - frozenset(draining) for name, those in workers.items()}

    def workers(self, model: str) -> frozenset[str]:
        """Names of those that serve the model and are up; if none is, of those that did."""
        return self._workers.get(model, frozenset())


def _workers_by_name(models: Mapping[str, Models]) -> dict[str, frozenset[str]]:
    workers = defaultdict[str, set[str]](set)
    for worker, names in models.items():
        for name in names:
            workers[name].add(worker)
    return {name: frozenset(those) for name, those in workers.items()}


def served_by(answer: bytes) -> dict[str, Served]:
    """By name, from OpenAI's list of models; raises msgspec.DecodeError, which is a ValueError."""
    cards = msgspec.json.decode(answer, type=_List).data
    roots = {card.id: card.root or "" for card in cards if not card.parent}
    return {_name(card): _served(card, roots) for card in cards}


def cards_of(answer: bytes) -> dict[str, dict[str, Any]]:
    """By name, the entries of the same list as the engine wrote them; raises as `served_by`."""
    whole = msgspec.json.decode(answer, type=_WholeList).data
    known = msgspec.convert(whole, list[_Card])
    return {
        _name(card): {**entry, "id": _name(card)} for card, entry in zip(known, whole, strict=True)
    }


def joined(cards: Iterable[Cards]) -> dict[str, dict[str, Any]]:
    """The entries of several workers as one list, by name and in order.

    Of a model that several serve, the first entry counts; of `max_model_len` the smallest, as a
    request may go to any of them.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, card in (each for of_worker in cards for each in of_worker.items()):
        entry = found.setdefault(name, dict(card))
        lengths = [n for n in (entry.get(_LENGTH), card.get(_LENGTH)) if type(n) is int]
        if lengths:
            entry[_LENGTH] = min(lengths)
    return dict(sorted(found.items()))


def root_of_sglang(answer: bytes) -> str:
    """Where SGLang loaded its tokenizer from, by GET /server_info; ValueError for anything else."""
    info = msgspec.json.decode(answer, type=_ServerInfo)
    return info.tokenizer_path or info.model_path or ""


def with_root(served: Mapping[str, Served], root: str) -> dict[str, Served]:
    """The same, with the folder of the models whose root is but their name (SGLang 0.5.23)."""
    return {
        name: msgspec.structs.replace(each, root=root) if root and each.root == each.base else each
        for name, each in served.items()
    }


def model_of(served: dict[str, Served]) -> str:
    """The name that workers with the same model have in common: the first one they list."""
    return next((model.base for model in served.values()), "")


def _name(card: _Card) -> str:
    # SGLang (0.5.23) lists an adapter by its bare name, but takes that for the base model; what it
    # understands is base:adapter. vLLM (0.32) takes the name that it lists.
    return f"{card.parent}:{card.id}" if card.parent and card.owned_by == "sglang" else card.id


def _served(card: _Card, roots: dict[str, str]) -> Served:
    engines = frozenset([Engine.SGLANG if card.owned_by == "sglang" else Engine.VLLM])
    if not card.parent:
        return Served(card.id, "", roots[card.id], engines=engines)
    root = roots.get(card.parent, "")
    return Served(card.parent, card.id, root, card.root or "", engines)


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    owned_by: str = ""


class _ServerInfo(msgspec.Struct):
    model_path: str | None = None
    tokenizer_path: str | None = None


class _List(msgspec.Struct):
    data: list[_Card]


class _WholeList(msgspec.Struct):
    data: list[dict[str, Any]]
