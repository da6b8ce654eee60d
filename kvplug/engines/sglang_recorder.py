"""Recorders that stand in for SGLang's own, and only note what happens to its tree.

In:  the radix cache of a scheduler, before it has cached anything.
Out: from `take`, items for kvplug/engines/sglang_notes.py, which makes SGLang's own events of them.

SGLang's Python trees hash each page and make an event of it on the scheduler's thread. Here they
note a node's number and the bytes of its tokens. SGLang's Rust tree records and hashes by itself;
what is left out is the conversion of its tuples to events. Read against SGLang 0.5.23; whether that
is what runs is for kvplug/engines/sglang_guard.py to say.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Final, Protocol

Failed = Callable[[Exception], None]
"""What is told that a recorder gave up."""

_TOKENS: Final = "q"


class Key(Protocol):
    """A RadixKey."""

    extra_key: str | None
    cache_salt: str | None
    is_bigram: bool

    def raw_token_ids(self) -> array[int]:
        """One more than there are pairs, if it is keyed by pairs."""


class Node(Protocol):
    """A TreeNode or UnifiedTreeNode."""

    id: int
    key: Key
    parent: Node | None
    children: dict[Any, Node]
    hash_value: list[str] | None


class Owner(Protocol):
    """What has a recorder: a RadixCache, or a core of a UnifiedRadixCache."""

    kv_events: Any


class Tree(Owner, Protocol):
    """A RadixCache or a UnifiedTreeCore."""

    root_node: Node
    _split_node: Callable[[Key, Node, int], Any]
    _unregister_node: Callable[[Node], None]


class LoraNames(Protocol):
    """A LoRANameTable."""

    def get(self, extra_key: str) -> str | None:
        """Of an extra_key that a request was registered with."""

    def resolve(self, extra_key: str) -> str | None:
        """The same, or of the adapter's id at its end."""


class RustRecorder:
    """Instead of _RustKVCacheEventRecorder: the binding's tuples as they are.

    Those of a LoRA adapter get its name, which the binding does not know, as one more field.
    """

    def __init__(self, owner: Owner, failed: Failed) -> None:
        stock = owner.kv_events
        self.enabled: bool = stock.enabled
        self._owner, self._stock, self._failed = owner, stock, failed
        self._take_tuples = stock._binding.take_events
        self.record_all_cleared = stock.record_all_cleared
        self._name_of = name_of(stock._lora_names, is_dynamo=stock._dynamo_format)

    def take(self) -> list[Any]:
        """What was recorded since the last call."""
        events: list[Any] = self._take_tuples()
        try:
            for place, event in enumerate(events):
                key = event[-1]  # extra_key, but for all_blocks_cleared, which has its tag alone
                if key is not None and (name := self._name_of(key)) is not None:
                    events[place] = (*event, name)
        except Exception as error:  # noqa: BLE001  # SGLang goes on with its own recorder
            self.detach()
            self._failed(error)
            return []
        return events

    def detach(self) -> None:
        """Let SGLang's own recorder go on."""
        self._owner.kv_events = self._stock


class TreeRecorder:
    """Instead of KVCacheEventRecorder, in a RadixCache or a UnifiedTreeCore.

    Notes splits and, in a UnifiedTreeCore, the end of nodes, by methods that it puts before those
    of its owner.
    """

    def __init__(self, owner: Tree, failed: Failed) -> None:
        stock = owner.kv_events
        self.enabled: bool = stock.enabled
        self.page_size: int = stock.page_size
        self.dynamo_format: bool = stock.dynamo_format
        self.lora_names = stock.lora_names
        self._owner, self._stock, self._failed = owner, stock, failed
        self._name_of = name_of(stock.lora_names, is_dynamo=stock.dynamo_format)
        self._notes: list[Any] = stock.take()
        self._known: set[int] = set()
        self._removed_is_gone = not hasattr(owner, "_unregister_node")
        self._split, owner._split_node = owner._split_node, self._split_node
        if not self._removed_is_gone:
            self._unregister, owner._unregister_node = owner._unregister_node, self._node_gone

    def record_store(
        self, node: Node, medium: str | None = None, *, session_id: str | None = None
    ) -> None:
        """A node's blocks are in a tier; without a medium on the device."""
        if not self.enabled:
            return
        try:
            described = self._described(node)
            self._notes.append(("node_stored", medium or "GPU", session_id, *described))
        except Exception as error:  # noqa: BLE001  # SGLang goes on with its own recorder
            self._give_up(error)

    def record_remove(self, node: Node, medium: str | None = None) -> None:
        """A node's blocks left a tier."""
        if not self.enabled:
            return
        try:
            if node.id not in self._known:
                self._notes.append(("node", *self._described(node)))
            self._notes.append(("node_removed", node.id, medium or "GPU", self._removed_is_gone))
            if self._removed_is_gone:
                self._known.discard(node.id)
        except Exception as error:  # noqa: BLE001  # SGLang goes on with its own recorder
            self._give_up(error)

    def record_all_cleared(self) -> None:
        """The tree is empty."""
        if self.enabled:
            self._known.clear()
            self._notes.append(("all_blocks_cleared",))

    def take(self) -> list[Any]:
        """What was noted since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def detach(self) -> None:
        """Let SGLang's own recorder go on. What is noted and was not taken is lost."""
        owner = self._owner
        owner.kv_events = self._stock
        del owner._split_node
        if not self._removed_is_gone:
            del owner._unregister_node
        self._notes.clear()
        hash_all_nodes(owner.root_node, self.page_size)

    def _described(self, node: Node) -> tuple[Any, ...]:
        """What hashing takes; parents that were never stored come before, without an event."""
        parent, parent_id = node.parent, None
        if parent is not None and parent.parent is not None:
            parent_id = parent.id
            if parent_id not in self._known:
                self._notes.append(("node", *self._described(parent)))
        self._known.add(node.id)
        key = node.key
        raw = key.raw_token_ids()
        if raw.typecode != _TOKENS:
            raw = array(_TOKENS, raw)
        extra_key = key.extra_key
        name = None if extra_key is None else self._name_of(extra_key)
        tokens = raw.tobytes()
        return (node.id, parent_id, tokens, key.is_bigram, extra_key, key.cache_salt, name)

    def _split_node(self, key: Key, child: Node, split_len: int) -> object:
        result = self._split(key, child, split_len)
        if child.id in self._known:
            # A UnifiedTreeCore returns what else is to be done, too.
            new_node = result[0] if type(result) is tuple else result
            self._known.add(new_node.id)
            num_pages = split_len // self.page_size
            self._notes.append(("node_split", new_node.id, child.id, num_pages))
        return result

    def _node_gone(self, node: Node) -> None:
        self._unregister(node)
        if node.id in self._known:
            self._known.discard(node.id)
            self._notes.append(("node_gone", node.id))

    def _give_up(self, error: Exception) -> None:
        self.enabled = False
        try:
            self.detach()
        except Exception as more:  # noqa: BLE001  # SGLang's recorder cannot go on: nobody records
            self._stock.enabled = False
            self._owner.kv_events = self._stock
            error = more
        self._failed(error)


def recorder_for(owner: Any, failed: Failed) -> RustRecorder | TreeRecorder:  # noqa: ANN401
    """Put kvplug's recorder in the place of SGLang's."""
    is_compiled = hasattr(owner, "_binding")
    recorder = RustRecorder(owner, failed) if is_compiled else TreeRecorder(owner, failed)
    owner.kv_events = recorder
    return recorder


def name_of(lora_names: LoraNames, *, is_dynamo: bool) -> Callable[[str], str | None]:
    """SGLang's way from extra_key to the name of a LoRA adapter, which depends on the format."""
    return lora_names.resolve if is_dynamo else lora_names.get


def hash_all_nodes(root: Node, page_size: int) -> None:
    """SGLang's own recorder takes a parent without hashes for none."""
    from sglang.srt.mem_cache.utils import compute_node_hash_values

    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        if node.hash_value is None:
            node.hash_value = compute_node_hash_values(node, page_size)
        waiting.extend(node.children.values())
