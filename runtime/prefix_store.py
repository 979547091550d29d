"""Keep the prefix cache on disk over restarts: save its pages at shutdown, load them into free pages at start.

One safetensors file holds the raw pages and, as metadata, their names and the digests of their bytes. A file of another
model, page layout or format is not used; a page whose bytes are not those that were saved is left out, for it would give
wrong answers that nobody notices. Neither is a reason not to start: loading says what it did. The file holds token ids of
prompts, so only its owner may read it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from relaxpack.dist.integrity import sha256_bytes
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.kv_cache.prefix_cache import CachedPage, chain_digest

FILE_NAME = "prefix.safetensors"
FORMAT = 2          # 1 had no digests of the pages' bytes
_AT_ONCE = 64       # pages copied to the device together


class PageAccess(Protocol):
    def read_pages(self, page_ids: list[int]) -> np.ndarray: ...
    def write_pages(self, page_ids: list[int], pages: np.ndarray) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreReport:
    pages: int
    reason: str     # why not more; empty when all went well


def _access(engine: Engine) -> PageAccess | None:
    runner = engine.runner
    return cast(PageAccess, runner) if hasattr(runner, "read_pages") and hasattr(runner, "write_pages") else None


def _layout(engine: Engine, access: PageAccess, model_key: str) -> dict[str, str]:
    """What must be equal for stored pages to mean the same."""
    scratch = access.read_pages([0])
    return {"format": str(FORMAT), "model": model_key, "page_size": str(engine.runner.page_size),
            "dtype": str(scratch.dtype), "shape": json.dumps(list(scratch.shape[1:]))}


def save_prefixes(engine: Engine, folder: Path, model_key: str, max_pages: int = 1 << 16) -> StoreReport:
    """Write the cached pages, most recently used ones if there are more than `max_pages`.

    `model_key` names the weights exactly, for example by the bundle's digest: pages of one model are noise to another.
    """
    access = _access(engine)
    if access is None:
        return StoreReport(0, "the runner cannot read pages")
    recent = {page_id: place for place, page_id in enumerate(engine.scheduler.pool.cached_pages())}
    pages = sorted((p for p in engine.scheduler.cache.pages() if p.page_id in recent), key=lambda p: recent[p.page_id])
    pages = pages[-max_pages:]
    if not pages:
        return StoreReport(0, "nothing is cached")
    raw = np.ascontiguousarray(access.read_pages([p.page_id for p in pages])).reshape(len(pages), -1).view(np.uint8)
    entries = [{"digest": p.digest.hex(), "parent": p.parent.hex(), "token_ids": p.token_ids,
                "sha256": sha256_bytes(data.data)} for p, data in zip(pages, raw, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{FILE_NAME}.{os.getpid()}"
    try:
        with open(beside, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)):
            pass
        save_file({"pages": raw}, beside, {**_layout(engine, access, model_key), "entries": json.dumps(entries)})
        os.chmod(beside, 0o600)
        os.replace(beside, folder / FILE_NAME)
    finally:
        beside.unlink(missing_ok=True)
    return StoreReport(len(pages), "")


def load_prefixes(engine: Engine, folder: Path, model_key: str) -> StoreReport:
    """Fill free pages with stored ones, most recently used first; evicts nothing. Pages with damaged bytes are left out:
    what follows them in a prompt is found again once they are computed."""
    path, access = folder / FILE_NAME, _access(engine)
    if access is None:
        return StoreReport(0, "the runner cannot write pages")
    if not engine.scheduler.cache.enabled:
        return StoreReport(0, "the prefix cache is off")
    if not path.exists():
        return StoreReport(0, f"{path} does not exist yet")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            for name, expected in _layout(engine, access, model_key).items():
                if metadata.get(name) != expected:
                    return StoreReport(0, f"{path} was written for another {name}: {metadata.get(name)}, not {expected}")
            stored = json.loads(metadata["entries"])
            entries = [_entry(e, engine.runner.page_size) for e in stored]
            return _fill(engine, access, path, entries, [str(e["sha256"]) for e in stored], file.get_tensor("pages"))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        return StoreReport(0, f"{path} is damaged: {error}")


def _entry(data: dict[str, object], page_size: int) -> CachedPage:
    token_ids = tuple(int(t) for t in cast(list[int], data["token_ids"]))
    parent, digest = bytes.fromhex(str(data["parent"])), bytes.fromhex(str(data["digest"]))
    if not 0 < len(token_ids) <= page_size or chain_digest(parent, token_ids) != digest:
        raise ValueError("a page does not have the digest it is named by")
    return CachedPage(0, digest, parent, token_ids)


def _fill(engine: Engine, access: PageAccess, path: Path, entries: list[CachedPage], digests: list[str],
          raw: np.ndarray) -> StoreReport:
    """`raw`: the pages' bytes, uint8 [len(entries), bytes of a page]."""
    pool, cache = engine.scheduler.pool, engine.scheduler.cache
    scratch = access.read_pages([0])
    if raw.dtype != np.uint8 or raw.shape != (len(entries), scratch[0].nbytes):
        raise ValueError(f"{len(entries)} pages have data of shape {raw.shape}")
    raw = np.ascontiguousarray(raw)
    sound = [place for place, digest in enumerate(digests) if sha256_bytes(raw[place].data) == digest]
    fitting = sound[max(0, len(sound) - pool.num_free):]
    for start in range(0, len(fitting), _AT_ONCE):
        part = fitting[start:start + _AT_ONCE]
        page_ids = [pool.take() for _ in part]
        pages = raw[part].view(scratch.dtype)
        access.write_pages(page_ids, pages.reshape(len(part), *scratch.shape[1:]))
        for page_id, entry in zip(page_ids, (entries[place] for place in part), strict=True):
            cache.register(page_id, entry.digest, entry.parent, entry.token_ids)
            pool.release(page_id)       # in order, so that what was used last is evicted last
    reasons = []
    if damaged := len(entries) - len(sound):
        reasons.append(f"{path} is damaged: {damaged} of its {len(entries)} pages have other bytes than were saved and are "
                       "left out")
    if more := len(sound) - len(fitting):
        reasons.append(f"{more} more did not fit into free pages")
    return StoreReport(len(fitting), "; ".join(reasons))
