"""Writing and opening bundles, both forms: what goes in comes out, nothing half-written stays, damage is named."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from relaxpack.dist import writer as writer_module
from relaxpack.dist.bundle import Bundle, BundleWriter
from relaxpack.dist.host import Gpu, Host
from relaxpack.dist.store import open_store
from relaxpack.errors import (
    BundleError,
    DamagedMemberError,
    EnvironmentProblem,
    MissingMemberError,
    NotABundleError,
    TargetMismatchError,
)
from relaxpack.target import TargetSpec
from tests.helpers.bundles import CANARIES, LIBRARY, SHARD, STEM, make_manifest, parameters, target_entry, write_bundle

FORMS = pytest.mark.parametrize("name", ["x.bundle", "x.rpk"])


@FORMS
def test_what_goes_in_comes_out(tmp_path: Path, name: str) -> None:
    written = write_bundle(tmp_path / name)
    with Bundle.open(tmp_path / name, verify="full") as bundle:
        assert bundle.manifest == written
        assert bundle.read("canary.json") == CANARIES.to_bytes()
        assert bundle.path(LIBRARY).read_bytes() == bundle.read(LIBRARY)
        wanted = {f"{n}.{s}" if s else n: array for n, buffers in parameters().items() for s, array in buffers.items()}
        found = dict(bundle.params(STEM))
        assert list(found) == list(wanted)
        for tensor, array in wanted.items():
            assert found[tensor].dtype == array.dtype
            np.testing.assert_array_equal(found[tensor], array)
        found["embed.weight"][:] = 0     # a private mapping: the bundle does not change
        bundle.check_digest(SHARD)
    assert [p.name for p in tmp_path.iterdir()] == [name], "nothing else stays behind"


@FORMS
def test_equal_inputs_give_equal_bytes(tmp_path: Path, name: str) -> None:
    for folder in ("a", "b"):
        write_bundle(tmp_path / folder / name)

    def content(path: Path) -> dict[str, bytes]:
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        return {str(p.relative_to(path)): p.read_bytes() for p in files}

    assert content(tmp_path / "a" / name) == content(tmp_path / "b" / name)


@FORMS
def test_large_tensors_start_on_64_byte_boundaries(tmp_path: Path, name: str) -> None:
    write_bundle(tmp_path / name)
    arrays = dict(Bundle.open(tmp_path / name).params(STEM))
    # norm.weight has 132 bytes, so it goes to the shard's end and all others stay aligned.
    assert {tensor for tensor, array in arrays.items() if array.ctypes.data % 64} <= {"norm.weight"}


def test_unpacked_library_goes_away_with_the_bundle(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.rpk")
    bundle = Bundle.open(tmp_path / "x.rpk")
    file = bundle.path(LIBRARY)
    assert file.exists() and bundle.path(LIBRARY) == file
    bundle.close()
    assert not file.exists()


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        with BundleWriter(tmp_path / "deep" / "x.bundle") as writer:
            writer.add_bytes("canary.json", b"{}")
            with writer.params(STEM) as params:
                params.add("a", {"": np.zeros(4, np.float32)})
                raise error
    assert os.listdir(tmp_path) == []


def test_an_error_while_replacing_keeps_the_old_bundle(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    write_bundle(path)
    with pytest.raises(ValueError), BundleWriter(path, force=True) as writer:
        writer.add_bytes("canary.json", b"{}")
        raise ValueError
    Bundle.open(path, verify="full")
    assert os.listdir(tmp_path) == ["x.bundle"]


def test_leaving_without_finish_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="without finish"), BundleWriter(tmp_path / "x.bundle") as writer:
        writer.add_bytes("canary.json", b"{}")
    assert os.listdir(tmp_path) == []


def test_existing_paths(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    write_bundle(path)
    with pytest.raises(BundleError, match="--force"):
        BundleWriter(path)
    write_bundle(path, force=True)
    Bundle.open(path, verify="full")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for other in ("precious", "file"):
        with pytest.raises(BundleError, match="not a bundle"):
            BundleWriter(tmp_path / other, force=True)
    assert (tmp_path / "precious" / "thesis.txt").exists()
    (tmp_path / "empty").mkdir()
    write_bundle(tmp_path / "empty")   # an empty folder holds nothing that could be lost


def test_a_folder_is_replaced_by_a_single_file_and_back(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.bundle")
    shutil.move(tmp_path / "x.bundle", tmp_path / "x.rpk")
    write_bundle(tmp_path / "x.rpk", force=True)
    assert (tmp_path / "x.rpk").is_file()


def test_what_dead_writers_left_is_removed(tmp_path: Path) -> None:
    dead, alive, new = (tmp_path / f"x.bundle.partial-{pid}" for pid in (1, 2, 3))
    for folder in (dead, alive, new):
        folder.mkdir()
    (dead / "lock").touch()
    with (alive / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_bundle(tmp_path / "x.bundle")
    assert not dead.exists() and alive.exists() and new.exists()


def test_the_slower_of_two_writers_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BundleError, match="--force"), BundleWriter(tmp_path / "x.bundle") as slow:
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write_bundle(tmp_path / "x.bundle")
        before = (tmp_path / "x.bundle" / "manifest.json").stat()
        slow.add_bytes(LIBRARY, b"x")
        with slow.params(STEM) as params:
            params.add("a", {"": np.zeros(4, np.float32)})
        slow.finish(make_manifest(target_entry(["a"])))
    assert os.listdir(tmp_path) == ["x.bundle"]
    assert (tmp_path / "x.bundle" / "manifest.json").stat() == before


def test_an_interruption_between_two_renames_brings_the_old_bundle_back(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / folder.name).touch()
    monkeypatch.setattr(writer_module, "_exchange", lambda one, other: False)

    def interrupted(self: Path, target: Path) -> None:
        if self == new:
            raise KeyboardInterrupt
        os.rename(self, target)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer_module._put(new, old, tmp_path / "aside")
    assert os.listdir(old) == ["old"]


def test_places_where_nothing_can_be_made_are_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match=r"file is a file; choose another -o path"):
        writer_module.check_destination(tmp_path / "file" / "x.bundle", False)
    with pytest.raises(EnvironmentProblem, match=r"File name too long"):
        writer_module.check_destination(tmp_path / ("a" * 300), False)
    with pytest.raises(EnvironmentProblem, match=r"cannot write /proc/x.bundle"):
        write_bundle(Path("/proc/x.bundle"))


def test_the_folder_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path, message in ((".", "you stand in"), ("..", "not a bundle")):
        with pytest.raises(BundleError, match=message):
            write_bundle(Path(path), force=True)


def test_a_full_disk_is_named_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(writer_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(EnvironmentProblem, match=r"no disk space.*1 MB are free.*-o path"):
        write_bundle(tmp_path / "x.bundle")
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="no disk space left"), BundleWriter(tmp_path / "x.bundle"):
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == []


def test_the_writer_checks_what_the_manifest_claims(tmp_path: Path) -> None:
    for order, library in ((["other"], LIBRARY), (["a"], "lib/other.so")):
        with pytest.raises(ValueError, match=r"param_order differ|was not added"):
            with BundleWriter(tmp_path / "x.bundle") as writer:
                writer.add_bytes(library, b"x")
                with writer.params(STEM) as params:
                    params.add("a", {"": np.zeros(4, np.float32)})
                writer.finish(make_manifest(target_entry(order)))


@FORMS
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_bundle(path)
    file, offset, size = open_store(path).region(SHARD)
    with file.open("r+b") as f:
        f.seek(offset + size - 100)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 1]))
    Bundle.open(path)   # sizes are right, and parameters are too large to hash at every start
    with pytest.raises(DamagedMemberError, match=SHARD):
        Bundle.open(path, verify="full")


def test_a_damaged_library_or_small_member_is_refused_even_when_opened_fast(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.bundle")
    for member in (LIBRARY, "canary.json"):
        file = tmp_path / "x.bundle" / member
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    bundle = Bundle.open(tmp_path / "x.bundle")
    with pytest.raises(DamagedMemberError, match=LIBRARY):
        bundle.path(LIBRARY)
    with pytest.raises(DamagedMemberError, match="canary.json"):
        bundle.read("canary.json")


def test_missing_and_cut_members(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    write_bundle(path)
    shard = path / SHARD
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(DamagedMemberError, match=f"{SHARD} is damaged: it has 1000 bytes"):
        Bundle.open(path)
    shard.unlink()
    with pytest.raises(MissingMemberError, match=SHARD):
        Bundle.open(path)


def test_only_members_that_the_manifest_names_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    write_bundle(path)
    (path / "extra.json").write_text("{}")
    with pytest.raises(MissingMemberError, match="extra.json"):
        Bundle.open(path).read("extra.json")


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_text("hello"),
                                  lambda p: p.write_bytes(b"PK\x03\x04" + bytes(100))],
                         ids=["nothing", "empty folder", "text", "broken zip"])
def test_not_a_bundle(tmp_path: Path, make) -> None:
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(NotABundleError):
        Bundle.open(path)


@pytest.mark.parametrize("name", ["checkpoint/config.json", "model.gguf"])
def test_a_checkpoint_is_told_from_a_bundle(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    checkpoint = tmp_path / name if name.endswith(".gguf") else tmp_path / "checkpoint"
    command = f"relaxpack build .*{checkpoint.name} -o {checkpoint.stem}.bundle"
    with pytest.raises(NotABundleError, match=f"it is a checkpoint: {command}$"):
        Bundle.open(checkpoint)


def test_a_cut_manifest_is_named_with_its_bundle(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.bundle")
    (tmp_path / "x.bundle" / "manifest.json").write_text("{")
    with pytest.raises(DamagedMemberError, match=r"x\.bundle: manifest\.json is damaged: .*copy or build the bundle again"):
        Bundle.open(tmp_path / "x.bundle")


def test_a_cut_single_file(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.rpk")
    whole = (tmp_path / "x.rpk").read_bytes()
    (tmp_path / "x.rpk").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(NotABundleError, match="cut short"):
        Bundle.open(tmp_path / "x.rpk")


def test_select_target(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.bundle")
    bundle = Bundle.open(tmp_path / "x.bundle")
    assert bundle.select_target(Host("x86_64", ("avx2", "fma", "avx512f"))).library == LIBRARY
    with pytest.raises(TargetMismatchError, match=r"cpu:x86-64-v3: this CPU lacks fma.*x86_64 CPU with avx2; no NVIDIA "
                                                  r"GPU.*from 'some model': relaxpack build MODEL --target cpu"):
        bundle.select_target(Host("x86_64", ("avx2",)))
    gpu_host = Host("x86_64", ("avx2", "fma"), (Gpu("NVIDIA H200", (9, 0), 1 << 37),))
    with pytest.raises(TargetMismatchError, match="another kind was asked for.*--target cuda"):
        bundle.select_target(gpu_host, kind="cuda")


def test_a_gpu_target_names_what_is_missing(tmp_path: Path) -> None:
    write_bundle(tmp_path / "x.bundle", target=TargetSpec("cuda", "sm_90a"))
    bundle = Bundle.open(tmp_path / "x.bundle")
    with pytest.raises(TargetMismatchError, match="needs compute capability exactly 9.0, NVIDIA A100 has 8.0"):
        bundle.select_target(Host("x86_64", (), (Gpu("NVIDIA A100", (8, 0), 1 << 36),)))
    with pytest.raises(TargetMismatchError, match=r"This machine: x86_64 CPU; no NVIDIA GPU\. Build one"):
        bundle.select_target(Host("x86_64", ("avx2", "fma")))       # what the CPU has is beside the point
