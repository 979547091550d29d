"""Where a bundle's members lie: a folder or one uncompressed zip. Both answer the same questions (size, open,
region); neither decompresses, follows links or writes. Nothing here knows the manifest's content.
"""

from __future__ import annotations

import io
import os
import shlex
import stat
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO, Protocol

from relaxpack.dist.integrity import MAX_MANIFEST_BYTES, MAX_MEMBERS, check_member_name
from relaxpack.dist.manifest import MANIFEST
from relaxpack.errors import DamagedMemberError, MissingMemberError, NotABundleError, UnsafeMemberError

SINGLE_FILE_SUFFIX = ".rpk"


class Store(Protocol):
    path: Path

    def size(self, name: str) -> int:
        """Bytes of a member. Raises MissingMemberError or UnsafeMemberError."""

    def open(self, name: str) -> BinaryIO: ...

    def region(self, name: str) -> tuple[Path, int, int]:
        """(file, offset, bytes) where the member lies, for memory mapping."""


def require_something(path: Path) -> None:
    """Raises NotABundleError where nothing is at `path`."""
    if not path.exists():
        raise NotABundleError(f"{path} does not exist; build a bundle with: relaxpack build MODEL -o {path}")


def open_store(path: Path) -> Store:
    """Folder or single file, with a manifest of sane size. Raises NotABundleError."""
    require_something(path)
    if path.is_dir():
        store: Store = FolderStore(path)
    elif path.is_file():
        store = ZipStore(path)
    else:
        raise NotABundleError(f"{path} is neither a folder nor a file: not a bundle")
    try:
        size = store.size(MANIFEST)
    except MissingMemberError:
        hint = _build_hint(path) if (path / "config.json").is_file() else ""
        raise NotABundleError(f"{path} has no {MANIFEST}: not a relaxpack bundle{hint}") from None
    if size > MAX_MANIFEST_BYTES:
        raise DamagedMemberError(f"{path}: {MANIFEST} has {size} bytes, more than {MAX_MANIFEST_BYTES}")
    return store


def _build_hint(path: Path) -> str:
    output = shlex.quote(path.resolve().name.removesuffix(".gguf") + ".bundle")
    return f"; it is a checkpoint: relaxpack build {shlex.quote(str(path))} -o {output}"


class FolderStore:
    """A folder; members are regular files, and no step on the way to one is a link."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _locate(self, name: str) -> tuple[Path, int]:
        here = self.path
        parts = check_member_name(name).split("/")
        for depth, part in enumerate(parts, 1):
            here = here / part
            try:
                info = here.lstat()
            except (FileNotFoundError, NotADirectoryError):
                raise MissingMemberError(f"{self.path}: member {name} is missing; the bundle is incomplete, "
                                         "copy or build it again") from None
            wanted = stat.S_ISREG if depth == len(parts) else stat.S_ISDIR
            if not wanted(info.st_mode):
                raise UnsafeMemberError(f"{self.path}: member {name} is not a regular file (a link or a device); "
                                        "do not load this bundle")
        return here, info.st_size

    def size(self, name: str) -> int:
        return self._locate(name)[1]

    def open(self, name: str) -> BinaryIO:
        # O_NOFOLLOW closes the gap between the check and the opening.
        return os.fdopen(os.open(self._locate(name)[0], os.O_RDONLY | os.O_NOFOLLOW), "rb")

    def region(self, name: str) -> tuple[Path, int, int]:
        file, size = self._locate(name)
        return file, 0, size


class ZipStore:
    """One zip whose members are stored as they are, so that they can be memory-mapped where they lie."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError, ValueError, NotImplementedError, struct.error):
            hint = _build_hint(path) if path.suffix == ".gguf" else " (or it was cut short)"
            raise NotABundleError(f"{path} is not a bundle: neither a folder nor a {SINGLE_FILE_SUFFIX} file{hint}"
                                  ) from None
        if len(infos) > MAX_MEMBERS + 1:
            raise DamagedMemberError(f"{path} holds {len(infos)} members, more than {MAX_MEMBERS}")
        self._infos: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            name = check_member_name(info.filename)
            if name in self._infos:
                raise UnsafeMemberError(f"{path}: member {name} stands twice; do not load this bundle")
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise UnsafeMemberError(f"{path}: member {name} is compressed or encrypted; members are stored as is")
            self._infos[name] = info

    def _info(self, name: str) -> zipfile.ZipInfo:
        try:
            return self._infos[check_member_name(name)]
        except KeyError:
            raise MissingMemberError(f"{self.path}: member {name} is missing; the bundle is incomplete, "
                                     "copy or build it again") from None

    def size(self, name: str) -> int:
        return self._info(name).file_size

    def open(self, name: str) -> BinaryIO:
        file, offset, size = self.region(name)
        return io.BufferedReader(_Slice(file, offset, size))

    def region(self, name: str) -> tuple[Path, int, int]:
        """Where a member's bytes lie: file, offset, length. Members are stored uncompressed."""
        info = self._info(name)
        with self.path.open("rb") as f:
            f.seek(info.header_offset)
            header = f.read(30)
            total = f.seek(0, os.SEEK_END)
        if len(header) != 30 or header[:4] != b"PK\x03\x04":
            raise DamagedMemberError(f"{self.path}: member {name} is damaged: no local header")
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        offset = info.header_offset + 30 + name_length + extra_length
        if offset + info.file_size > total:
            raise DamagedMemberError(f"{self.path}: member {name} is damaged: it reaches beyond the end of the file")
        return self.path, offset, info.file_size


class _Slice(io.RawIOBase):
    """Read-only view of bytes [offset, offset + size) of a file."""

    def __init__(self, file: Path, offset: int, size: int) -> None:
        self._file = file.open("rb", buffering=0)
        self._file.seek(offset)
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def, override]
        view = memoryview(buffer)[:self._left]
        count = self._file.readinto(view) or 0
        self._left -= count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def write_single_file(store: Store, names: list[str], path: Path) -> None:
    """Pack members into one zip at `path`: manifest first, then sorted; no compression, the date 1980-01-01, data on
    64-byte boundaries. Equal members give equal bytes."""
    ordered = [MANIFEST, *sorted(name for name in names if name != MANIFEST)]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name in ordered:
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            info.external_attr = 0o644 << 16
            info.file_size = store.size(name)
            large = info.file_size >= 1 << 30   # forced here, so that the header's length is known below
            assert archive.fp is not None
            data = archive.fp.tell() + 30 + len(name.encode()) + (20 if large else 0) + 4
            padding = -data % 64
            info.extra = struct.pack("<HH", 0xD935, padding) + bytes(padding)  # the alignment field of zipalign
            with store.open(name) as source, archive.open(info, "w", force_zip64=large) as sink:
                while chunk := source.read(1 << 20):
                    sink.write(chunk)
