"""What kvplug's recorder noted in SGLang's scheduler, to the events that SGLang would have made.

In:  per batch the recorder's items (kvplug/engines/sglang_recorder.py), decoded from msgpack.
Out: the same batch as SGLang's own encoder writes it: maps with its fields in its order.

Items of the Rust tree are the tuples of its binding, already hashed. Those of the Python trees name
nodes and bring tokens, so a mirror of the tree's nodes keeps what hashing their children takes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplug.errors import DecodeError
from kvplug.events import salt_with_extra_key

DIGEST_BYTES: Final = 32
NAME_BYTES: Final = 8
LORA_ID_CHARACTERS: Final = 32
"""Of the adapter's id, in hex, which SGLang 0.5.23 appends to extra_key."""

_SALT_TAG: Final = b"sglang-cache-salt-v1\0"
_NAMESPACE_TAG: Final = b"sglang-kv-event-namespace-v1"
_WIDE_TAG: Final = b"\xff"
_MAX_NARROW: Final = 2**32 - 1
_HEX: Final = frozenset("0123456789abcdef")

Item = Any
Event = dict[str, Any]
Tokens = NDArray[np.int64]


class NotesError(DecodeError):
    """A note cannot be understood, so it is not known what the engine holds."""


class Node(NamedTuple):
    """What the hashes of a tree node and of its children depend on.

    digests: SHA-256 of each page, chained, one behind the other.
    """

    digests: bytes
    extra_key: str | None
    cache_salt: str | None
    lora_name: str | None

    def split(self, num_pages: int) -> tuple[Node, Node]:
        """The first pages, and the rest."""
        place = num_pages * DIGEST_BYTES
        head, tail = self.digests[:place], self.digests[place:]
        return self._replace(digests=head), self._replace(digests=tail)


class Stored(NamedTuple):
    """A `block_stored` of the Rust tree's binding behind its tag, and the adapter's name, which
    the recorder adds where there is one.
    """

    names: list[int]
    parent: int | None
    tokens: list[Any]
    block_size: int
    medium: str
    cache_salt: str | None
    session_id: str | None
    extra_key: str | None
    lora_name: str | None = None


class Described(NamedTuple):
    """A node of a Python tree. parent_id: None below the root; tokens: int64, little-endian, one
    more than the node has units if those are pairs.
    """

    node_id: int
    parent_id: int | None
    tokens: bytes
    is_bigram: bool
    extra_key: str | None
    cache_salt: str | None
    lora_name: str | None


class Expander:
    """expand the items of one batch after another.

    context: `page_size` in tokens; `dynamo_format`, as SGLang has it; `names_extra_keys`: whether
    blocks with an extra_key get a salt and hashes of their own, which the stock format has not.
    """

    def __init__(self, context: dict[str, Any]) -> None:
        self._page_size: int = context["page_size"]
        self._is_dynamo: bool = context["dynamo_format"]
        self._names_extra_keys: bool = context["names_extra_keys"]
        self._nodes: dict[int, Node] = {}
        self._has_lost_track = False
        self._kinds: dict[str, Callable[..., Event | None]] = {
            "block_stored": self._block_stored,
            "block_removed": self._block_removed,
            "all_blocks_cleared": self._all_cleared,
            "node": self._node,
            "node_stored": self._node_stored,
            "node_removed": self._node_removed,
            "node_split": self._node_split,
            "node_gone": self._node_gone,
        }

    def expand(self, items: Sequence[Item]) -> list[Event]:
        """Stock events in the order of the items; those that are stock events stay as they are.

        NotesError where a node is not known, once: from then on, and until the whole cache is
        cleared, what cannot be named is left out.
        """
        events: list[Event] = []
        is_mergeable = False  # the last event is of a Python tree, whose recorder joins neighbours
        for item in items:
            if isinstance(item, dict):
                events.append(item)
                is_mergeable = False
                continue
            event = self._event(item)
            if event is None:
                continue
            is_node = item[0].startswith("node")
            if not (is_node and is_mergeable and _merged(events[-1], event)):
                events.append(event)
            is_mergeable = is_node
        return events

    def forget(self) -> None:
        """Items were lost, so nodes may have changed."""
        self._nodes.clear()
        self._has_lost_track = True

    def _event(self, item: Sequence[Any]) -> Event | None:
        try:
            kind, *fields = item
            return self._kinds[kind](*fields)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, KeyError) and self._has_lost_track:
                return None
            self.forget()
            raise NotesError(f"a note of SGLang's tree cannot be used: {item!r:.200}") from error

    # Of the Rust tree.

    def _block_stored(self, *fields: object) -> Event:
        stored = Stored(*fields)  # type: ignore[arg-type]  # as the binding has them
        node = Node(b"", stored.extra_key, stored.cache_salt, stored.lora_name)
        # In Dynamo's format the binding has applied the namespace.
        seed = None if self._is_dynamo else self._seed(node)
        if seed is not None:
            names = [_in_namespace(name, seed) for name in stored.names]
            parent = None if stored.parent is None else _in_namespace(stored.parent, seed)
            stored = stored._replace(names=names, parent=parent)
        return self._event_of(stored)

    def _block_removed(
        self, names: list[int], medium: str, extra_key: str | None, lora_name: str | None = None
    ) -> Event:
        seed = None if self._is_dynamo else self._seed(Node(b"", extra_key, None, lora_name))
        if seed is not None:
            names = [_in_namespace(name, seed) for name in names]
        return {"type": "BlockRemoved", "block_hashes": names, "medium": medium}

    def _all_cleared(self) -> Event:
        self._nodes.clear()
        self._has_lost_track = False
        return {"type": "AllBlocksCleared"}

    # Of the Python trees.

    def _node(self, *fields: object) -> None:
        self._note(Described(*fields))  # type: ignore[arg-type]  # as the recorder has them

    def _note(self, note: Described) -> Node:
        node = self._nodes.get(note.node_id)
        if node is None:
            prior = self._prior(note.parent_id, note.cache_salt)
            pages = self._pages(np.frombuffer(note.tokens, dtype="<i8"), note.is_bigram)
            digests = b"".join(chained_digests(pages, prior, is_bigram=note.is_bigram))
            node = Node(digests, note.extra_key, note.cache_salt, note.lora_name)
            self._nodes[note.node_id] = node
        return node

    def _node_stored(self, medium: str, session_id: str | None, *fields: object) -> Event:
        note = Described(*fields)  # type: ignore[arg-type]  # as the recorder has them
        node, parent = self._note(note), None
        if note.parent_id is not None:
            [parent] = self._names(self._nodes[note.parent_id], -1)
        raw = np.frombuffer(note.tokens, dtype="<i8")
        return self._event_of(
            Stored(
                names=self._names(node),
                parent=parent,
                tokens=(_pairs(raw) if note.is_bigram else raw).tolist(),
                block_size=self._page_size,
                medium=medium,
                cache_salt=node.cache_salt,
                session_id=session_id,
                extra_key=node.extra_key,
                lora_name=node.lora_name,
            )
        )

    def _node_removed(self, node_id: int, medium: str, is_gone: bool) -> Event:
        node = self._nodes[node_id]
        if is_gone:
            del self._nodes[node_id]
        return {"type": "BlockRemoved", "block_hashes": self._names(node), "medium": medium}

    def _node_split(self, new_id: int, child_id: int, num_pages: int) -> None:
        self._nodes[new_id], self._nodes[child_id] = self._nodes[child_id].split(num_pages)

    def _node_gone(self, node_id: int) -> None:
        self._nodes.pop(node_id, None)

    # Of both.

    def _event_of(self, stored: Stored) -> Event:
        event = {
            "type": "BlockStored",
            "block_hashes": stored.names,
            "parent_block_hash": stored.parent,
            "token_ids": stored.tokens,
            "block_size": stored.block_size,
            "lora_id": None,
            "medium": stored.medium,
        }
        named = {
            "cache_salt": self._salt(stored),
            "session_id": stored.session_id,
            "lora_name": stored.lora_name,
        }
        return event | {name: value for name, value in named.items() if value is not None}

    def _salt(self, stored: Stored) -> str | None:
        if not self._names_extra_keys:
            return stored.cache_salt
        extra_key = callers_key(stored.extra_key or "", stored.lora_name)
        return salt_with_extra_key(stored.cache_salt or "", extra_key) or None

    def _seed(self, node: Node) -> bytes | None:
        """Of the names, or None if they are the beginnings of the digests."""
        if self._is_dynamo:
            return namespace_seed(node.extra_key, node.cache_salt)
        is_named = node.lora_name is not None or self._names_extra_keys
        return namespace_seed(node.extra_key if is_named else None, None)

    def _names(self, node: Node, first: int = 0) -> list[int]:
        names = block_names(node.digests[first * DIGEST_BYTES :])
        seed = self._seed(node)
        return names if seed is None else [_in_namespace(name, seed) for name in names]

    def _prior(self, parent_id: int | None, salt: str | None) -> bytes:
        if parent_id is not None:
            return self._nodes[parent_id].digests[-DIGEST_BYTES:]
        return b"" if salt is None else hashlib.sha256(_SALT_TAG + salt.encode()).digest()

    def _pages(self, tokens: Tokens, is_bigram: bool) -> list[Tokens]:
        """Of pairs, each page has one token more, which is the first of the next one."""
        size, more = self._page_size, int(is_bigram)
        num_units = len(tokens) - more
        if num_units <= 0 or num_units % size:
            raise ValueError(f"expected full pages of {size}, got {num_units} tokens")
        return [tokens[at : at + size + more] for at in range(0, num_units, size)]


def namespace_seed(extra_key: str | None, cache_salt: str | None) -> bytes | None:
    """SGLang's kv_event_namespace_seed; None for no namespace."""
    if extra_key is None and cache_salt is None:
        return None
    parts = (extra_key, cache_salt)
    return hashlib.sha256(_NAMESPACE_TAG + b"".join(map(_counted, parts))).digest()


def _counted(part: str | None) -> bytes:
    if part is None:
        return b"\0"
    encoded = part.encode()
    return b"\1" + len(encoded).to_bytes(NAME_BYTES, "little") + encoded


def _in_namespace(name: int, seed: bytes) -> int:
    """SGLang's namespaced_block_hash."""
    digest = hashlib.sha256(seed + name.to_bytes(NAME_BYTES, "big", signed=True)).digest()
    return int.from_bytes(digest[:NAME_BYTES], "big", signed=True)


def chained_digests(pages: Sequence[Tokens], prior: bytes, *, is_bigram: bool) -> list[bytes]:
    """SGLang's native hash: of each page with what is before it."""
    digests = []
    for page in pages:
        prior = hashlib.sha256(prior + _page_bytes(page, is_bigram)).digest()
        digests.append(prior)
    return digests


def _page_bytes(page: Tokens, is_bigram: bool) -> bytes:
    """As 32-bit numbers; if one of them needs more, all as 64-bit numbers behind a tag."""
    units = _pairs(page) if is_bigram else page
    if int(page.max()) > _MAX_NARROW:
        return _WIDE_TAG + units.astype("<u8").tobytes()
    return units.astype("<u4").tobytes()


def _pairs(tokens: Tokens) -> Tokens:
    """int64 (n - 1, 2): each token with the next one."""
    return np.stack((tokens[:-1], tokens[1:]), axis=1)


def block_names(digests: bytes) -> list[int]:
    """SGLang's hash_str_to_int64 of each: the first 64 bits, signed."""
    words = np.frombuffer(digests, dtype=">i8").reshape(-1, DIGEST_BYTES // NAME_BYTES)
    return words[:, 0].tolist()  # type: ignore[no-any-return]


def callers_key(extra_key: str, lora_name: str | None) -> str:
    """The extra_key of the request: without the adapter's id."""
    lora_id = extra_key[-LORA_ID_CHARACTERS:]
    if lora_name is None or len(lora_id) < LORA_ID_CHARACTERS or not _HEX.issuperset(lora_id):
        return extra_key
    return extra_key[:-LORA_ID_CHARACTERS]


_ALIKE: Final = ("medium", "block_size", "cache_salt", "session_id", "lora_name")


def _merged(last: Event, event: Event) -> bool:
    """Join an event to the one before it where SGLang's KVCacheEventRecorder.enqueue does."""
    if last["type"] != event["type"]:
        return False
    if event["type"] == "BlockRemoved" and last["medium"] == event["medium"]:
        last["block_hashes"] += event["block_hashes"]
        return True
    if event["type"] != "BlockStored" or event["parent_block_hash"] != last["block_hashes"][-1]:
        return False
    if any(last.get(name) != event.get(name) for name in _ALIKE):
        return False
    last["block_hashes"] += event["block_hashes"]
    last["token_ids"] += event["token_ids"]
    return True
