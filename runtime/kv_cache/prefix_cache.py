"""`PrefixCache`: finds pages whose keys and values an equal prefix already computed.

A full page is named by a digest chained over its token ids and the page before it, starting from the salt, so equal
digest means equal prefix. The last, partly filled page of a finished sequence is kept too; it and full pages that agree
only in their first tokens are *partial* hits, which are copied before they are written. Pages and their lifetime belong
to the page pool; scheduling policy belongs to the scheduler.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from relaxpack.runtime.kv_cache.page_pool import PagePool

_SCAN = 32      # partial candidates looked at per match, newest first: bounds the work under a popular prefix


def root_digest(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"prefix root").digest()


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class CachedPage:
    page_id: int
    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]      # fewer than page_size for a partial page


@dataclass(frozen=True, slots=True)
class Hit:
    """`pages` are full hits in order; `partial` is (page id, number of leading tokens that agree)."""

    pages: list[int]
    partial: tuple[int, int] | None


class PrefixCache:
    def __init__(self, pool: PagePool, page_size: int, enabled: bool = True) -> None:
        self._pool = pool
        self._page_size = page_size
        self.enabled = enabled
        self._by_digest: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        # (parent digest, first token) -> pages after that parent, oldest first: candidates for a partial hit
        self._next: dict[tuple[bytes, int], dict[int, CachedPage]] = {}
        pool.on_evict = self._drop

    def __len__(self) -> int:
        return len(self._by_page)

    def extend_digests(self, digests: list[bytes], token_ids: Sequence[int], salt: str, upto: int) -> None:
        """Append to `digests` so that it names every full page within the first `upto` tokens."""
        size = self._page_size
        parent = digests[-1] if digests else root_digest(salt)
        for first in range(len(digests) * size, upto - size + 1, size):
            parent = chain_digest(parent, token_ids[first:first + size])
            digests.append(parent)

    def match(self, token_ids: Sequence[int], digests: list[bytes], salt: str, limit: int) -> Hit:
        """The longest cached prefix within the first `limit` tokens. Holds nothing: share before taking any page."""
        if not self.enabled:
            return Hit([], None)
        size = self._page_size
        self.extend_digests(digests, token_ids, salt, limit)
        pages: list[int] = []
        parent = root_digest(salt)
        for digest in digests[:limit // size]:
            found = self._by_digest.get(digest)
            if found is None:
                break
            pages.append(found.page_id)
            parent = digest
        first = len(pages) * size
        return Hit(pages, self._match_partial(parent, token_ids[first:min(first + size, limit)]))

    def _match_partial(self, parent: bytes, wanted: Sequence[int]) -> tuple[int, int] | None:
        candidates = self._next.get((parent, wanted[0])) if wanted else None
        best: tuple[int, int] | None = None
        for _, page in zip(range(_SCAN), reversed(candidates.values()) if candidates else (), strict=False):
            count = _common_prefix(page.token_ids, wanted)
            if best is None or count > best[1]:
                best = (page.page_id, count)
        return best

    def register(self, page_id: int, digest: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        """Offer a held page whose first len(token_ids) slots are computed and will not change."""
        if not self.enabled or digest in self._by_digest:
            return
        self._drop(page_id)      # a partial page that grew: the longer entry replaces it
        page = CachedPage(page_id, digest, parent, tuple(token_ids))
        self._by_digest[digest] = page
        self._by_page[page_id] = page
        self._next.setdefault((parent, page.token_ids[0]), {})[page_id] = page
        self._pool.keep(page_id)

    def register_partial(self, page_id: int, parent: bytes, token_ids: Sequence[int]) -> None:
        """Offer the last page of a sequence, filled with token_ids only, unless it or the cache holds them already."""
        if not self.enabled or page_id in self._by_page:
            return
        best = self._match_partial(parent, token_ids)
        if best is None or best[1] < len(token_ids):
            self.register(page_id, chain_digest(parent, token_ids), parent, token_ids)

    def pages(self) -> Iterator[CachedPage]:
        """Every page with its name, in the order of registration, parents first."""
        return iter(self._by_page.values())

    def _drop(self, page_id: int) -> None:
        page = self._by_page.pop(page_id, None)
        if page is None:
            return
        del self._by_digest[page.digest]
        key = (page.parent, page.token_ids[0])
        siblings = self._next[key]
        del siblings[page_id]
        if not siblings:
            del self._next[key]

    def clear(self) -> None:
        """Forget everything; held pages stay with their holders."""
        for page_id in list(self._by_page):
            self._drop(page_id)
            self._pool.forget(page_id)

    def check(self) -> None:
        """Assert that names, digests and the pool's kept pages agree."""
        assert set(self._by_page) == self._pool._kept, "the pool keeps other pages than the cache names"
        assert len(self._by_digest) == len(self._by_page)
        assert all(self._by_digest[p.digest] is p for p in self._by_page.values())
        assert sum(map(len, self._next.values())) == len(self._by_page)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
