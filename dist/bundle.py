"""`Bundle`: open a bundle (a folder or a single file) and read its members. The manifest is checked first, and only
members it names are ever read. What members mean is not known here; writing is in `writer.py`.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from relaxpack.dist.compat import choose_target, mismatch
from relaxpack.dist.host import Host, detect_host
from relaxpack.dist.integrity import check_member_name, parse_json, sha256_bytes, sha256_stream
from relaxpack.dist.manifest import MANIFEST, Manifest, TargetEntry
from relaxpack.dist.store import FolderStore, Store, open_store
from relaxpack.dist.writer import BundleWriter
from relaxpack.errors import BundleError, DamagedMemberError, MissingMemberError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from relaxpack.dist.params import TargetParams

__all__ = ["Bundle", "BundleWriter"]
Verify = Literal["fast", "full"]


class Bundle:
    """An open bundle. `Bundle.open` is the constructor for users; `close` (or `with`) removes what was unpacked."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self.manifest = manifest
        self._checked: set[str] = set()
        self._unpacked: Path | None = None
        self._finalizer: weakref.finalize | None = None

    @classmethod
    def open(cls, path: str | Path, verify: Verify = "fast") -> Bundle:
        """"fast" checks that every member is there with its size, "full" also the digests. Raises a BundleError that
        names what is wrong."""
        if verify not in ("fast", "full"):
            raise ValueError(f"verify={verify!r}: expected 'fast' or 'full'")
        store = open_store(Path(path))
        with store.open(MANIFEST) as stream:
            data = stream.read()
        try:
            bundle = cls(store, Manifest.from_bytes(data))
        except DamagedMemberError as error:
            raise DamagedMemberError(f"{path}: {error}; copy or build the bundle again") from None
        bundle.check_sizes()
        if verify == "full":
            for name in bundle.manifest.members:
                bundle.check_digest(name)
        return bundle

    @property
    def location(self) -> Path:
        """The folder or file that was opened."""
        return self._store.path

    def check_sizes(self) -> None:
        """Raise DamagedMemberError or MissingMemberError unless every member is there and as long as the manifest says."""
        for name, member in self.manifest.members.items():
            size = self._store.size(name)
            if size != member.bytes:
                raise DamagedMemberError(f"{self.location}: {name} is damaged: it has {size} bytes, the manifest says "
                                         f"{member.bytes}; copy or build the bundle again")
        for entry in self.manifest.targets:
            self._member(entry.library)

    def check_digest(self, name: str) -> None:
        """Raise DamagedMemberError unless the member's SHA-256 is the manifest's."""
        self._member(name)
        with self._store.open(name) as stream:
            self._compare(name, sha256_stream(stream))

    def _compare(self, name: str, digest: str) -> None:
        if digest != self.manifest.members[name].sha256:
            raise DamagedMemberError(f"{self.location}: {name} is damaged: its SHA-256 is {digest[:12]}..., the "
                                     f"manifest says {self.manifest.members[name].sha256[:12]}...; copy or build the "
                                     "bundle again")
        self._checked.add(name)

    def _member(self, name: str) -> None:
        if check_member_name(name) not in self.manifest.members:
            raise MissingMemberError(f"{self.location}: the manifest names no member {name}")

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.members

    def read(self, name: str) -> bytes:
        """A whole member, its digest checked. Meant for small ones; parameters are mapped by `params`."""
        self._member(name)
        with self._store.open(name) as stream:
            data = stream.read()
        self._compare(name, sha256_bytes(data))
        return data

    def read_json(self, name: str) -> Any:
        return parse_json(f"{self.location}: {name}", self.read(name))

    def path(self, name: str) -> Path:
        """A file with the member's bytes, its digest checked. For the single-file form it is unpacked into a private
        temporary folder that goes away with the bundle; a loaded library outlives its file."""
        self._member(name)
        if isinstance(self._store, FolderStore):
            if name not in self._checked:
                self.check_digest(name)
            return self._store.region(name)[0]
        if self._unpacked is None:
            self._unpacked = Path(tempfile.mkdtemp(prefix="relaxpack-"))
            self._finalizer = weakref.finalize(self, shutil.rmtree, self._unpacked, ignore_errors=True)
        file = self._unpacked / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with self._store.open(name) as source, file.open("xb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            with file.open("rb") as stream:
                self._compare(name, sha256_stream(stream))
        return file

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def param_members(self, stem: str) -> list[str]:
        prefix = f"params/{stem}/"
        return sorted(name for name in self.manifest.members
                      if name.startswith(prefix) and name.endswith(".safetensors"))

    def open_params(self, entry: TargetEntry) -> TargetParams:
        """A target's parameters, mapped. Raises DamagedMemberError if the shards hold other tensors than the manifest
        names."""
        from relaxpack.dist.params import ParamsReader, TargetParams

        def reader(stem: str) -> ParamsReader:
            return ParamsReader(self._store, self.param_members(stem))

        params = TargetParams(reader(entry.params), {stem: (reader(stem), names)
                                                     for stem, names in entry.shared_params.items()})
        order = entry.param_order
        if sorted(order) != sorted(params.names):
            differing = sorted(set(order) ^ set(params.names)) or sorted({n for n in order if order.count(n) > 1})
            raise DamagedMemberError(f"{self.location}: params/{entry.params} and the manifest name different parameters: "
                                     + ", ".join(differing[:5]))
        return params

    def params(self, stem: str) -> Iterator[tuple[str, np.ndarray]]:
        """(tensor name, memory-mapped array) of the first target whose parameters are in `stem`, in its order. Raises
        what `open_params` raises, before the first one."""
        entry = next((entry for entry in self.manifest.targets if entry.params == stem), None)
        if entry is None:
            raise BundleError(f"{self.location}: no target uses the parameters {stem!r}")
        return self.open_params(entry).items(entry.param_order)

    def target(self, name: str | None = None) -> TargetEntry:
        """The entry of a name like "cpu:x86-64-v3" or, where only one fits it, of a kind; the first one for None. Raises
        UsageError that lists what the bundle has."""
        entries = self.manifest.targets
        fitting = [entry for entry in entries if name in (None, entry.target.name, entry.target.kind)]
        if not fitting or (name is not None and len(fitting) > 1):
            raise UsageError(f"{self.location} has {'several targets' if fitting else 'no target'} {name}: it holds "
                             + ", ".join(entry.target.name for entry in entries))
        return fitting[0]

    def select_target(self, host: Host | None = None, kind: str | None = None) -> TargetEntry:
        """The best target for `host` (default: this machine), of one `kind` ("cpu", "cuda") if given. Raises
        TargetMismatchError that says what is missing and how to build a fitting bundle."""
        host = detect_host() if host is None else host
        entry = choose_target(self.manifest.targets, host, kind)
        if entry is None:
            source = shlex.quote(str(self.manifest.source.get("name") or "MODEL"))
            raise mismatch(self.manifest.targets, host, source, kind)
        return entry
