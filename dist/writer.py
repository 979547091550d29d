"""`BundleWriter`: writes a bundle beside its place and renames it when all is there. An error or Ctrl-C removes every
trace; a reader never sees half a bundle. What the members mean is not known here.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn

from relaxpack.dist.integrity import check_member_name, sha256_stream
from relaxpack.dist.manifest import MANIFEST, Manifest, Member, TargetEntry
from relaxpack.dist.params import ParamsReader, ParamsWriter, TargetParams
from relaxpack.dist.store import SINGLE_FILE_SUFFIX, FolderStore, open_store, write_single_file
from relaxpack.errors import BundleError, DestinationError, EnvironmentProblem

_SPARE_BYTES = 16 << 20   # left free on the disk


class BundleWriter:
    """`with BundleWriter(path) as w: w.add_bytes(...); w.finish(manifest)`.

    A path that ends in `.rpk` gives the single-file form. An existing bundle is replaced only with `force`; anything
    else that exists is never touched.
    """

    def __init__(self, path: str | Path, force: bool = False) -> None:
        self.path = Path(path)
        self._destination = Path(os.path.abspath(path))   # has a name even where the path ends in ".."
        self._partial = self._destination.with_name(f"{self._destination.name}.partial-{os.getpid()}")
        self._lock: BinaryIO | None = None
        self._folder = self._partial / "bundle"
        self._members: set[str] = set()
        self._params: dict[str, set[str]] = {}    # stem → tensor names written
        self._tensors: dict[tuple[str, str], str] = {}   # (name, digest) → stem that holds it
        self._finished = False
        self._force = force
        self._made: list[Path] = []      # folders above the bundle that were not there
        check_destination(self.path, force)

    def __enter__(self) -> BundleWriter:
        try:
            with self._disk_errors():
                self._made = [folder for folder in self._destination.parents if not folder.exists()]
                self._destination.parent.mkdir(parents=True, exist_ok=True)
                remove_stale(self._destination)
                self._partial.mkdir()
                self._lock = (self._partial / "lock").open("wb")   # held while this writer lives
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                self._folder.mkdir()
                self.scratch.mkdir()
        except BaseException:
            self._clean_up()
            raise
        return self

    @property
    def scratch(self) -> Path:
        """A folder on the bundle's disk for files on the way to it; it goes away with the writer."""
        return self._partial / "scratch"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._clean_up()
        if isinstance(error, OSError):
            self._explain(error)
        if kind is None and not self._finished:
            raise RuntimeError("BundleWriter was left without finish(): nothing was written")

    def _clean_up(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
        if not self._finished:
            with suppress(OSError):      # somebody else uses the folder by now
                for folder in self._made:
                    folder.rmdir()

    @property
    def members(self) -> frozenset[str]:
        """Names of what has been added."""
        return frozenset(self._members)

    def require_space(self, size: int) -> None:
        """Raise EnvironmentProblem unless the disk takes `size` more bytes. Call it before long work."""
        free = shutil.disk_usage(self._partial).free
        if size + _SPARE_BYTES > free:
            raise EnvironmentProblem(f"no disk space: {self.path} needs {(size + _SPARE_BYTES) / 1e6:.0f} MB more, "
                                     f"{free / 1e6:.0f} MB are free; free some or choose another -o path")

    def add_bytes(self, name: str, data: bytes) -> None:
        with self._disk_errors():
            self.require_space(len(data))
            self._place(name).write_bytes(data)

    def add_file(self, name: str, source: str | Path) -> None:
        with self._disk_errors():
            self.require_space(os.stat(source).st_size)
            shutil.copyfile(source, self._place(name))

    @contextmanager
    def params(self, stem: str) -> Iterator[ParamsWriter]:
        """A writer of shards under params/<stem>/, which leaves out what an earlier stem holds."""
        writer = ParamsWriter(self._folder, check_member_name(stem), self.require_space, known=self._tensors)
        try:
            with self._disk_errors():
                yield writer
                writer.close()
        finally:
            writer.abort()
        for name in writer.members:
            self._place(name)
        self._params[stem] = set(writer.names).difference(*writer.shared.values())

    def placement(self, params: ParamsWriter) -> tuple[str, dict[str, tuple[str, ...]]]:
        """(stem, shared_params) of a target entry whose parameters were written with `params`. Where another stem holds
        just these tensors, that is the target's stem."""
        for stem, names in params.shared.items():
            if set(names) == set(params.names) == self._params[stem]:
                return stem, {}
        return params.stem, {stem: tuple(names) for stem, names in sorted(params.shared.items())}

    def open_params(self, entry: TargetEntry) -> TargetParams:
        """What has been written of a target's parameters, mapped; valid until the bundle is finished."""
        return TargetParams(self._reader(entry.params), {stem: (self._reader(stem), names)
                                                         for stem, names in entry.shared_params.items()})

    def _reader(self, stem: str) -> ParamsReader:
        prefix = f"params/{stem}/"
        return ParamsReader(FolderStore(self._folder), sorted(n for n in self._members if n.startswith(prefix)))

    def finish(self, manifest: Manifest) -> Manifest:
        """Write the manifest with the digests of all members, and put the bundle in its place."""
        for entry in manifest.targets:
            if entry.library not in self._members:
                raise ValueError(f"target {entry.target.name}: library {entry.library} was not added")
            written = set(self._params.get(entry.params, ()))
            for stem, names in entry.shared_params.items():
                written |= set(names) & self._params.get(stem, set())
            if written != set(entry.param_order):
                raise ValueError(f"target {entry.target.name}: params/{entry.params} and param_order differ in "
                                 f"{sorted(written ^ set(entry.param_order))[:5]}")
        with self._disk_errors():
            store = FolderStore(self._folder)
            members = {}
            for name in sorted(self._members):
                with store.open(name) as stream:
                    members[name] = Member(store.size(name), sha256_stream(stream))
            manifest = replace(manifest, members=members, format_version=manifest.oldest_format())
            (self._folder / MANIFEST).write_bytes(manifest.to_bytes())
            result = self._folder
            if self.path.suffix == SINGLE_FILE_SUFFIX:
                self.require_space(sum(member.bytes for member in members.values()))
                result = self._partial / "bundle.rpk"
                write_single_file(store, list(members), result)
            check_destination(self.path, self._force)    # somebody may have been quicker
            _put(result, self._destination, self._partial / "replaced")
        self._finished = True
        return manifest

    def _place(self, name: str) -> Path:
        check_member_name(name)
        if name in self._members or name == MANIFEST:
            raise ValueError(f"member {name} was added twice")
        self._members.add(name)
        file = self._folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._explain(error)
            raise EnvironmentProblem(f"cannot write {self.path}: {error.strerror or error}"
                                     f"{f' ({error.filename})' if error.filename else ''}; choose another -o path") from None

    def _explain(self, error: OSError) -> None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EnvironmentProblem(f"no disk space left while writing {self.path}; nothing was kept: free some or "
                                     "choose another -o path") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise EnvironmentProblem(f"cannot write {self.path}: {error.strerror} ({error.filename}); "
                                     "choose another -o path") from None


def check_destination(path: Path, force: bool) -> None:
    """Raise DestinationError where a bundle must not be written. Commands call it before any work."""
    def refuse(why: str) -> NoReturn:
        raise DestinationError(f"{path} {why}")

    try:
        exists = path.exists() or path.is_symlink()
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}; choose another -o path") from None
    if not exists:
        _check_parent(path)
        return
    if path.resolve() == Path.cwd():
        refuse("is the folder you stand in; choose another -o path")
    if path.is_dir() and not any(path.iterdir()):
        return
    try:
        open_store(path)
    except BundleError:
        refuse("exists and is not a bundle; it is not touched, choose another -o path")
    if not force:
        refuse("exists; pass --force to replace it")


def _check_parent(path: Path) -> None:
    """Raise where nothing can be made at `path`."""
    folder = next(folder for folder in Path(os.path.abspath(path)).parents if folder.exists())
    if not folder.is_dir():
        raise DestinationError(f"{path} cannot be made: {folder} is a file; choose another -o path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"cannot write {path}: {folder} is not writable; choose another -o path")


def remove_stale(path: Path) -> None:
    """Remove what dead processes left of an earlier writing of `path`."""
    for partial in path.parent.glob(f"{glob.escape(path.name)}.partial-*"):
        try:
            with (partial / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)
        except OSError:
            pass   # somebody is writing there, or just began to


def _put(result: Path, path: Path, aside: Path) -> None:
    """Rename `result` to `path`. What stood there changes places with it in one step where the file system can do that;
    else it is moved aside first, and comes back if something happens."""
    if not path.exists():
        result.rename(path)
        return
    if _exchange(result, path):
        return
    try:
        path.rename(aside)
        result.rename(path)
    except BaseException:
        if aside.exists() and not path.exists():
            aside.rename(path)
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Linux's renameat2 with RENAME_EXCHANGE; False where kernel, C library or file system has none."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2     # AT_FDCWD (fcntl.h), RENAME_EXCHANGE (linux/fs.h)
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
