"""What a bounded index drops, seen from outside: never a block before another one that stays."""

from kvplug.index.evicting import Eviction


class WatchedEvictions:
    """`contents` has the block of each sequence hash that may be in the index. `parent_of` gives
    the block before another one, None for the first of a sequence. `forget` is told what has gone.

    Of two blocks it is known that one comes behind the other if that was there as it came, and both
    have stayed since.
    """

    def __init__(self, index, parent_of, forget):
        self.contents, self.known, self.held = {}, set(), set()
        self._index, self._parent_of, self._forget = index, parent_of, forget
        self._plan, index.capacity_guard.eviction = index.capacity_guard.eviction, self._watched

    def note(self, held):
        """These blocks are in the index now."""
        came = held - self.held
        self.known |= {content for content in came if self._parent_of(content) in held}
        self.held = held
        self._drop_unknown()

    def _drop_unknown(self):
        self.known = {c for c in self.known & self.held if self._parent_of(c) in self.held}

    def _watched(self, num_blocks) -> Eviction:
        before, num_before = self._hashes(), self._index.capacity_guard.stats.num_blocks
        eviction = self._plan(num_blocks)
        assert eviction.num_blocks > 0
        advance = eviction.advance

        def watched(max_steps):
            advance(max_steps)
            if eviction.is_done:
                gone = before - self._hashes()
                stats = self._index.capacity_guard.stats
                assert len(gone) == stats.num_blocks - num_before <= eviction.num_blocks
                self._lose({self.contents[hash_] for hash_ in gone})

        eviction.advance = watched
        return eviction

    def _hashes(self):
        return set(self._index.block_store.table.items()[0].tolist())

    def _lose(self, gone):
        left_behind = {c for c in self.known - gone if self._parent_of(c) in gone}
        assert not left_behind, f"{gone} went before {left_behind}"
        self.held -= gone
        self._drop_unknown()
        self._forget(gone)
