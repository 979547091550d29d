"""Bundles made to do harm. Each is refused by name before a byte outside it is touched or much memory is taken."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from relaxpack.dist.bundle import Bundle
from relaxpack.dist.integrity import sha256_bytes
from relaxpack.dist.manifest import MANIFEST
from relaxpack.errors import (
    BundleError,
    DamagedMemberError,
    MissingMemberError,
    NotABundleError,
    UnsafeMemberError,
)
from tests.helpers.bundles import LIBRARY, SHARD, STEM, write_bundle


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "x.bundle")
    return tmp_path / "x.bundle"


def rewrite(folder: Path, change: Callable[[dict], object]) -> None:
    """Let `change` edit the manifest, as an attacker can."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def put(folder: Path, name: str, data: bytes) -> None:
    """Replace a member with `data` and make the manifest agree."""
    (folder / name).write_bytes(data)
    rewrite(folder, lambda m: m["members"].__setitem__(name, {"bytes": len(data), "sha256": sha256_bytes(data)}))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "lib/../../x", "lib\\x.so", "tokenizer/.hidden"])
def test_names_that_leave_the_bundle(folder: Path, name: str) -> None:
    rewrite(folder, lambda m: m["members"].__setitem__(name, {"bytes": 1, "sha256": "0" * 64}))
    with pytest.raises(UnsafeMemberError):
        Bundle.open(folder)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd"])
def test_names_asked_for_later(folder: Path, name: str) -> None:
    bundle = Bundle.open(folder)
    for ask in (bundle.read, bundle.path, bundle.check_digest):
        with pytest.raises(UnsafeMemberError):
            ask(name)


def test_library_outside_the_bundle(folder: Path) -> None:
    rewrite(folder, lambda m: m["targets"][0].__setitem__("library", "../evil.so"))
    with pytest.raises(UnsafeMemberError):
        Bundle.open(folder)


def test_library_that_no_digest_covers(folder: Path) -> None:
    (folder / "lib" / "other.so").write_bytes(b"code")
    rewrite(folder, lambda m: m["targets"][0].__setitem__("library", "lib/other.so"))
    with pytest.raises(MissingMemberError, match="lib/other.so"):
        Bundle.open(folder)


def test_links(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes((folder / LIBRARY).read_bytes())
    (folder / LIBRARY).unlink()
    (folder / LIBRARY).symlink_to(secret)
    with pytest.raises(UnsafeMemberError, match=LIBRARY):
        Bundle.open(folder)
    (folder / LIBRARY).unlink()
    os.link(secret, folder / LIBRARY)      # a hard link is a regular file
    Bundle.open(folder, verify="full")


def test_linked_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "lib").rename(tmp_path / "elsewhere")
    (folder / "lib").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeMemberError, match=LIBRARY):
        Bundle.open(folder)


def test_linked_manifest(folder: Path, tmp_path: Path) -> None:
    (folder / MANIFEST).rename(tmp_path / MANIFEST)
    (folder / MANIFEST).symlink_to(tmp_path / MANIFEST)
    with pytest.raises(UnsafeMemberError, match=MANIFEST):
        Bundle.open(folder)


@pytest.mark.parametrize("name", [MANIFEST, LIBRARY, SHARD])
def test_a_pipe_does_not_hang_the_reader(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UnsafeMemberError, match=name):
        Bundle.open(folder)


def test_a_manifest_of_a_terabyte(folder: Path) -> None:
    with (folder / MANIFEST).open("r+b") as f:
        f.truncate(1 << 40)     # sparse: takes no disk
    with pytest.raises(DamagedMemberError, match=MANIFEST):
        Bundle.open(folder)


def test_a_manifest_of_a_million_members(folder: Path) -> None:
    many = {f"m{i}": {"bytes": 0, "sha256": "0" * 64} for i in range(200_000)}
    rewrite(folder, lambda m: m.__setitem__("members", many))
    with pytest.raises(DamagedMemberError, match="200000 members"):
        Bundle.open(folder)


@pytest.mark.parametrize("header", [
    b'{"t":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}',
    b'{"t":{"dtype":"F32","shape":[4294967296,4294967296,16],"data_offsets":[0,0]}}',
    b'{"t":{"dtype":"U8","shape":[8],"data_offsets":[-8,0]}}',
    b"[" * 100_000,
])
def test_shards_that_claim_too_much(folder: Path, header: bytes) -> None:
    put(folder, SHARD, len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedMemberError, match=SHARD):
        list(Bundle.open(folder, verify="full").params(STEM))


def test_a_shard_header_of_exabytes_takes_no_memory(folder: Path) -> None:
    put(folder, SHARD, (1 << 62).to_bytes(8, "little") + b"{}")
    code = (f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({2 << 30}, {2 << 30}))\n"
            f"from relaxpack.dist.bundle import Bundle; list(Bundle.open({str(folder)!r}).params({STEM!r}))")
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True,
                          env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert "DamagedMemberError" in done.stderr and "MemoryError" not in done.stderr
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 2 << 30


def test_other_parameters_than_the_functions_take(folder: Path) -> None:
    rewrite(folder, lambda m: m["targets"][0]["param_order"].append("one.more"))
    with pytest.raises(DamagedMemberError, match="one.more"):
        Bundle.open(folder).params(STEM)
    rewrite(folder, lambda m: m["targets"][0].__setitem__("param_order", ["norm.weight"] * 4))
    with pytest.raises(DamagedMemberError):
        Bundle.open(folder).params(STEM)


def members_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def pack(path: Path, members: list[tuple[str | zipfile.ZipInfo, bytes]], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


def test_a_plain_zip_is_a_bundle(folder: Path, tmp_path: Path) -> None:
    """Alignment is the writer's courtesy, not the reader's condition."""
    bundle = Bundle.open(pack(tmp_path / "x.rpk", list(members_of(folder).items())), verify="full")
    assert len(list(bundle.params(STEM))) == 4


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "lib/"])
def test_zip_entries_that_leave_the_bundle(folder: Path, tmp_path: Path, name: str) -> None:
    path = pack(tmp_path / "x.rpk", [*members_of(folder).items(), (name, b"x")])
    with pytest.raises(UnsafeMemberError):
        Bundle.open(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bundle", "x.rpk"]


def test_zip_bomb(folder: Path, tmp_path: Path) -> None:
    members = {**members_of(folder), "bomb": bytes(1 << 24)}
    path = pack(tmp_path / "x.rpk", list(members.items()), zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsafeMemberError, match="compressed"):
        Bundle.open(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_entries_of_one_name(folder: Path, tmp_path: Path) -> None:
    path = pack(tmp_path / "x.rpk", [*members_of(folder).items(), (LIBRARY, b"the other code")])
    with pytest.raises(UnsafeMemberError, match="twice"):
        Bundle.open(path)


def test_zip_entry_larger_than_the_file(folder: Path, tmp_path: Path) -> None:
    path = pack(tmp_path / "x.rpk", list(members_of(folder).items()))
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")      # first entry of the central directory
    struct.pack_into("<II", data, at + 20, 1 << 30, 1 << 30)
    path.write_bytes(data)
    with pytest.raises(BundleError):
        Bundle.open(path)


def test_zip_entry_whose_local_header_is_elsewhere(folder: Path, tmp_path: Path) -> None:
    path = pack(tmp_path / "x.rpk", list(members_of(folder).items()))
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    struct.pack_into("<I", data, at + 42, 7)
    path.write_bytes(data)
    with pytest.raises(BundleError):
        Bundle.open(path, verify="full")


def test_every_cut_of_a_single_file_is_refused(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.rpk")
    whole = (tmp_path / "x.rpk").read_bytes()
    for keep in range(0, len(whole), len(whole) // 50):
        (tmp_path / "x.rpk").write_bytes(whole[:keep])
        with pytest.raises(NotABundleError):
            Bundle.open(tmp_path / "x.rpk")


def test_any_flipped_byte_is_found_or_harmless(folder: Path) -> None:
    """Outside the manifest, every changed byte changes a digest."""
    for name in members_of(folder):
        if name == MANIFEST:
            continue
        good = (folder / name).read_bytes()
        for at in range(0, len(good), max(1, len(good) // 20)):
            bad = bytearray(good)
            bad[at] ^= 0x10
            (folder / name).write_bytes(bad)
            with pytest.raises(DamagedMemberError, match=name):
                Bundle.open(folder, verify="full")
        (folder / name).write_bytes(good)
    Bundle.open(folder, verify="full")
