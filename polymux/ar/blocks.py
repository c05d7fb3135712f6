"""Which blocks of the paged cache belong to whom, and which of those that belong to nobody are still worth finding.

A block holds the keys and values of so many tokens in a row. Sequences that begin alike share the full blocks of that
beginning: a block counts its users, and is found again by what it holds and all that came before it. Knows numbers of
blocks; the tensors are somebody else's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

TRASH = 0  # a block that is never given away: whatever is written for nobody is written there
_ROOT = b""


class BlockPool:
    """Blocks 1 to `count`."""

    def __init__(self, count: int, block_size: int, caching: bool) -> None:
        self.count, self.block_size, self.caching = count, block_size, caching
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, count + 1))  # oldest first
        self._users = [0] * (count + 1)
        self._keys: list[bytes | None] = [None] * (count + 1)
        self._by_key: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self) -> int:
        """A block for whoever asks; the one that has been free for longest. There must be a free one."""
        block, _ = self._free.popitem(last=False)
        key, self._keys[block] = self._keys[block], None
        if key is not None:
            del self._by_key[key]
        self._users[block] = 1
        return block

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks that hold this beginning, as far as they are there. They have one more user now."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
            self._users[block] += 1
            self._free.pop(block, None)
        return found

    def remember(self, block: int, key: bytes) -> None:
        """The block is full, and this is its key. Of two blocks that hold the same, one is found."""
        if self.caching and self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def forget(self) -> None:
        """What blocks hold is not to be found any more."""
        self._keys = [None] * len(self._keys)
        self._by_key.clear()

    def give_back(self, blocks: Iterable[int]) -> None:
        """They have one user less. The last ones of a sequence are the first to be taken again: whoever begins alike
        needs the first ones."""
        for block in reversed(list(blocks)):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def next_key(self, before: bytes | None, tokens: Sequence[int]) -> bytes:
        """Of a full block with these tokens, after a block with key `before`."""
        digest = hashlib.blake2b(before or _ROOT, digest_size=16)
        digest.update(array("q", tokens).tobytes())
        return digest.digest()
