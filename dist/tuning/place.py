"""A place where bundles are exchanged: a folder, an HTTP server, an S3 bucket, whatever fsspec knows, by one URL. Knows
names and bytes, not records.

A place holds `<SHA-256>.jsonl` files that never change, so a reader needs no lock and a writer cannot spoil another's. What
is there is found by listing; `index.json` repeats the names for web servers that list nothing.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from relaxpack.dist.tuning.records_file import NAME
from relaxpack.errors import DatabaseError, EnvironmentProblem

INDEX = "index.json"
_TRIES = 5
_SETTLE_SECONDS = 0.5      # that an index needs at least to be as its writers leave it
_NO_UPLOADS = " (a web server must take PUT; where it does not, push to a folder or bucket that it serves)"
T = TypeVar("T")


class Place:
    """`url` names a folder of bundles, or one bundle (anything that ends in .jsonl), to read only. Every failure of the
    transport raises DatabaseError with the URL."""

    def __init__(self, url: str, wait: Callable[[float], None] = time.sleep) -> None:
        self.wait = wait
        self.url = url.rstrip("/") if "://" in url else str(Path(url).absolute())
        self.shown = _without_password(self.url)
        self.listing_problem = ""            # why nothing could be listed, to be said where nothing is found
        self._fs, self._root = self._guarded("open", self._connect)

    def _connect(self) -> tuple[Any, str]:
        try:
            import fsspec
        except ModuleNotFoundError:
            raise EnvironmentProblem("exchange needs fsspec: pip install 'relaxpack[tuning]'") from None
        return fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)

    @property
    def is_one_bundle(self) -> bool:
        return self.url.endswith(".jsonl")

    @property
    def _local(self) -> bool:
        return isinstance(self._fs.protocol, tuple) and "file" in self._fs.protocol

    def names(self) -> list[str]:
        """Bundles that are there, sorted; an empty or missing place has none."""
        if self.is_one_bundle:
            return [""]
        if self._local and Path(self._root).is_file():
            raise DatabaseError(f"{self.shown} is neither a tuning database (SQLite) nor a bundle of records (NAME.jsonl)")
        return sorted(set(self._listed()) | set(self._indexed()))

    def read(self, name: str) -> bytes:
        path = f"{self._root}/{name}" if name else self._root
        data: bytes = self._guarded(f"read {name} at", lambda: self._fs.cat_file(path))
        return data

    def write(self, name: str, data: bytes) -> None:
        """Put a bundle there and into the index. What stands under its name already has its bytes, or is damaged."""
        if self.is_one_bundle:
            raise DatabaseError(f"{self.shown} is one bundle, which is never changed; push to the folder that holds it")
        self._put(name, data)
        self._index(name)

    def _index(self, name: str) -> None:
        """Several may write the index at once, and the last one's is there. Each looks again after its own writing: where
        the place lists its bundles, whether all of them are in it; where it does not, whether its own still is, once
        another who had read the index before has had the time to write it."""
        for attempt in range(_TRIES + 1):
            began = time.monotonic()
            listed, indexed = self._listed(), self._indexed()
            if {name, *listed} <= set(indexed) or attempt == _TRIES:
                return
            self._put(INDEX, json.dumps(sorted({*indexed, *listed, name}), indent=0).encode())
            if name not in listed:
                self.wait(max(_SETTLE_SECONDS, 3 * (time.monotonic() - began)))

    def path(self, name: str) -> str:
        return f"{self.shown}/{name}" if name else self.shown

    def _put(self, name: str, data: bytes) -> None:
        if not self._local:
            self._guarded(f"write {name} to", lambda: self._fs.pipe_file(f"{self._root}/{name}", data), _NO_UPLOADS)
            return

        def beside_then_rename() -> None:
            folder = Path(self._root)
            folder.mkdir(parents=True, exist_ok=True)
            beside = folder / f".{name}.{os.getpid()}"
            try:
                beside.write_bytes(data)
                beside.replace(folder / name)
            finally:
                beside.unlink(missing_ok=True)

        self._guarded(f"write {name} to", beside_then_rename)

    def _listed(self) -> list[str]:
        """Names by listing; a server that cannot list has none."""
        try:
            found = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            # Not every web server lists. Where the place cannot be reached at all, reading the index fails as well.
            self.listing_problem = f" (listing it failed: {_said(error)})"
            return []
        return [name for name in (str(path).rstrip("/").rsplit("/", 1)[-1] for path in found) if NAME.fullmatch(name)]

    def _indexed(self) -> list[str]:
        try:
            data = self._guarded("read the index of", lambda: self._fs.cat_file(f"{self._root}/{INDEX}"))
        except _Missing:
            return []
        try:
            names = json.loads(data)
            return [name for name in names if isinstance(name, str) and NAME.fullmatch(name)]
        except (ValueError, RecursionError, TypeError):
            return []                        # damaged; the next push writes it anew

    def _guarded(self, what: str, action: Callable[[], T], web_hint: str = "") -> T:
        try:
            return action()
        except EnvironmentProblem:
            raise
        except FileNotFoundError:
            raise _Missing(f"cannot {what} {self.shown}: nothing is there") from None
        except ImportError as error:
            raise EnvironmentProblem(f"cannot {what} {self.shown}: {error}") from None
        except Exception as error:           # every transport has its own errors
            hint = web_hint if self.url.startswith(("http:", "https:")) else ""
            raise DatabaseError(f"cannot {what} {self.shown}: {_said(error)}{hint}") from None


class _Missing(DatabaseError):
    pass


def _said(error: Exception) -> str:
    return _without_password(" ".join(str(error).split())) or type(error).__name__


def _without_password(text: str) -> str:
    return re.sub(r"://[^/@\s]*@", "://***@", text)
