"""Bundles for several targets: tensors with equal bytes are stored once, dtypes belong to a target, the format version is
the oldest that says all, and a machine that nothing fits is told what there is. Libraries here are not code.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relaxpack.cli import run
from relaxpack.dist.bundle import Bundle, BundleWriter
from relaxpack.dist.describe import describe
from relaxpack.dist.diff import diff
from relaxpack.dist.host import Gpu, Host
from relaxpack.dist.manifest import MANIFEST, Manifest, TargetEntry
from relaxpack.errors import DamagedMemberError, NewerFormatError, TargetMismatchError, UnsafeMemberError, UsageError
from relaxpack.step_interface import STEP_INPUTS
from relaxpack.target import TargetSpec
from tests.helpers.bundles import INFO, make_manifest

CPU = TargetSpec("cpu", "x86-64-v3", ("avx2", "fma"))
OLD_GPU, GPU = TargetSpec("cuda", "sm_80"), TargetSpec("cuda", "sm_90a")
H200 = Host("x86_64", ("avx2", "fma"), (Gpu("NVIDIA H200", (9, 0), 1 << 37),))
A100 = replace(H200, gpus=(Gpu("NVIDIA A100", (8, 0), 1 << 36),))
NO_GPU = Host("x86_64", ("avx2", "fma"))


def tensors(kind: str) -> dict[str, np.ndarray]:
    """Norms are equal everywhere, matrices by kind."""
    rng = np.random.default_rng(kind == "cuda")
    dtype = np.float16 if kind == "cuda" else np.float32
    return {"norm": np.arange(64, dtype=np.float32), "matrix": rng.standard_normal((64, 32)).astype(dtype),
            "bias": rng.standard_normal(5).astype(np.float32)}


def write(path: Path, specs: list[TargetSpec], changes: dict[str, np.ndarray] | None = None) -> Manifest:
    """`changes`: tensors that the last target has otherwise."""
    entries = []
    with BundleWriter(path) as writer:
        for spec in specs:
            writer.add_bytes(f"lib/{spec.file_stem}.so", b"\x7fELF " + spec.name.encode())
            mine = {**tensors(spec.kind), **(changes or {} if spec is specs[-1] else {})}
            with writer.params(spec.file_stem) as params:
                for name, array in mine.items():
                    params.add(name, {"": array})
            stem, shared = writer.placement(params)
            dtypes = ("bfloat16", "bfloat16") if spec.kind == "cuda" else ("float32", "float32")
            entries.append(TargetEntry(spec, f"lib/{spec.file_stem}.so", stem, tuple(mine), tuple(STEP_INPUTS[spec.kind]),
                                       {"t": 4},
                                       {"decode": (1, 2)} if spec.kind == "cuda" else {}, {"arena_bytes": 64},
                                       activation_dtype=dtypes[0], kv_dtype=dtypes[1], shared_params=shared))
            for name, array in writer.open_params(entries[-1]).items(tuple(mine)):
                np.testing.assert_array_equal(array, mine[name])
        return writer.finish(make_manifest(*entries))


def stored(path: Path) -> list[str]:
    return [name for name in Bundle.open(path).manifest.members if name.startswith("params/")]


@pytest.mark.parametrize("name", ["x.bundle", "x.rpk"])
def test_equal_tensors_are_stored_once(tmp_path: Path, name: str) -> None:
    written = write(tmp_path / name, [CPU, OLD_GPU, GPU])
    assert [entry.params for entry in written.targets] == ["cpu-x86-64-v3", "cuda-sm_80", "cuda-sm_90a"]
    assert dict(written.targets[1].shared_params) == {"cpu-x86-64-v3": ("norm",)}
    assert dict(written.targets[2].shared_params) == {"cpu-x86-64-v3": ("norm",), "cuda-sm_80": ("matrix", "bias")}
    assert stored(tmp_path / name) == ["params/cpu-x86-64-v3/00001.safetensors", "params/cuda-sm_80/00001.safetensors"]
    with Bundle.open(tmp_path / name, verify="full") as bundle:
        assert bundle.manifest == written
        for entry in bundle.manifest.targets:
            found = dict(bundle.open_params(entry).items(entry.param_order))
            for tensor, array in tensors(entry.target.kind).items():
                assert found[tensor].dtype == array.dtype
                np.testing.assert_array_equal(found[tensor], array)


def test_a_tensor_that_differs_is_the_targets_own(tmp_path: Path) -> None:
    other = np.ones((64, 32), np.float16)
    written = write(tmp_path / "x.bundle", [OLD_GPU, GPU], {"matrix": other})
    assert dict(written.targets[1].shared_params) == {"cuda-sm_80": ("norm", "bias")}
    bundle = Bundle.open(tmp_path / "x.bundle")
    np.testing.assert_array_equal(bundle.open_params(written.targets[1])["matrix"], other)
    np.testing.assert_array_equal(bundle.open_params(written.targets[0])["matrix"], tensors("cuda")["matrix"])


@pytest.mark.parametrize("change", [{"matrix": tensors("cuda")["matrix"].view(np.int16)},
                                    {"matrix": tensors("cuda")["matrix"].reshape(32, 64)}])
def test_equal_bytes_of_another_type_are_another_tensor(tmp_path: Path, change: dict[str, np.ndarray]) -> None:
    written = write(tmp_path / "x.bundle", [OLD_GPU, GPU], change)
    assert "matrix" not in written.targets[1].shared_params["cuda-sm_80"]


def test_targets_with_all_parameters_equal_have_one_stem_and_the_old_format(tmp_path: Path) -> None:
    written = write(tmp_path / "x.bundle", [OLD_GPU, GPU])
    assert [entry.params for entry in written.targets] == ["cuda-sm_80", "cuda-sm_80"]
    assert not any(entry.shared_params for entry in written.targets)


@pytest.mark.parametrize("specs, version", [([CPU], 1), ([CPU, replace(CPU, arch="x86-64-v4")], 1), ([GPU], 2),
                                            ([CPU, GPU], 2)])
def test_the_oldest_format_that_says_all_is_written(tmp_path: Path, specs: list[TargetSpec], version: int) -> None:
    """`make_manifest` says float32 for all: a reader of format 1 would give a GPU target pages of float32."""
    written = write(tmp_path / "x.bundle", specs)
    assert written.format_version == version
    assert [written.info_for(entry).kv_dtype for entry in written.targets] == [
        "bfloat16" if spec.kind == "cuda" else "float32" for spec in specs]


def test_bundles_of_older_writers_have_one_pair_of_dtypes(tmp_path: Path) -> None:
    write(tmp_path / "x.bundle", [CPU])
    value = json.loads((tmp_path / "x.bundle" / MANIFEST).read_bytes())
    for key in ("activation_dtype", "kv_dtype", "explain"):
        del value["targets"][0][key]
    old = Manifest.from_json(value)
    assert old.info_for(old.targets[0]) == INFO and old.targets[0].explain == "explain.json"


def test_a_reader_of_format_1_refuses_what_it_would_misread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.bundle", [CPU, GPU])
    monkeypatch.setattr("relaxpack.dist.manifest.FORMAT_VERSION", 1)
    with pytest.raises(NewerFormatError, match="format 2 is newer than this relaxpack reads"):
        Bundle.open(tmp_path / "x.bundle")


@pytest.mark.parametrize("host, kind, name", [
    (H200, None, "cuda:sm_90a"), (A100, None, "cuda:sm_80"), (NO_GPU, None, "cpu:x86-64-v3"),
    (H200, "cpu", "cpu:x86-64-v3"), (H200, "cuda", "cuda:sm_90a")])
def test_the_best_target_that_fits_is_taken(tmp_path: Path, host: Host, kind: str | None, name: str) -> None:
    write(tmp_path / "x.bundle", [CPU, OLD_GPU, GPU])
    assert Bundle.open(tmp_path / "x.bundle").select_target(host, kind).target.name == name


def test_where_nothing_fits_both_sides_are_named(tmp_path: Path) -> None:
    write(tmp_path / "x.bundle", [CPU, GPU])
    bundle = Bundle.open(tmp_path / "x.bundle")
    bare = Host("x86_64", ("f16c",), A100.gpus)
    with pytest.raises(TargetMismatchError) as caught:
        bundle.select_target(bare)
    text = str(caught.value)
    for part in ("cpu:x86-64-v3: this CPU lacks avx2 fma", "cuda:sm_90a: it needs compute capability exactly 9.0",
                 "NVIDIA A100 (compute capability 8.0)", "relaxpack build", "--target cpu"):
        assert part in text
    with pytest.raises(TargetMismatchError, match=r"cpu:x86-64-v3: another kind was asked for; cuda:sm_90a: this machine "
                                                  r"has no NVIDIA GPU.*Nothing built for cuda runs here: without "
                                                  r"--device cuda"):
        bundle.select_target(NO_GPU, "cuda")


def test_a_target_is_named_by_name_or_kind(tmp_path: Path) -> None:
    write(tmp_path / "x.bundle", [CPU, OLD_GPU, GPU])
    bundle = Bundle.open(tmp_path / "x.bundle")
    assert bundle.target() is bundle.target("cpu") is bundle.manifest.targets[0]
    assert bundle.target("cuda:sm_90a") is bundle.manifest.targets[2]
    for name in ("cuda", "tpu"):
        with pytest.raises(UsageError, match=f"{name}: it holds cpu:x86-64-v3, cuda:sm_80, cuda:sm_90a"):
            bundle.target(name)


def test_inspect_shows_each_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "x.bundle", [CPU, OLD_GPU, GPU])
    what = describe(Bundle.open(tmp_path / "x.bundle"), H200)
    assert what["chosen"] == "cuda:sm_90a"
    assert [t["reasons"] == [] for t in what["targets"]] == [True, False, True]
    assert [t["kv_dtype"] for t in what["targets"]] == ["float32", "bfloat16", "bfloat16"]
    assert what["targets"][2]["shared_with"] == ["cpu:x86-64-v3", "cuda:sm_80"]
    assert run(["inspect", str(tmp_path / "x.bundle")]) == 0
    out = capsys.readouterr().out
    assert "bfloat16, bfloat16" in out and "float32, float32" in out and "shared with" in out


def test_diff_pairs_targets_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.bundle", [CPU, GPU])
    write(tmp_path / "b.bundle", [GPU, CPU])
    write(tmp_path / "c.bundle", [CPU])
    a, b, c = (Bundle.open(tmp_path / f"{name}.bundle") for name in "abc")
    assert not any("library" in path for path in diff(a, b)["fields"])     # only who shares from whom
    assert diff(a, c)["fields"]["targets.cuda:sm_90a.kv_dtype"] == ["bfloat16", None]


def test_digests_of_all_targets_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "x.bundle", [CPU, GPU])
    assert run(["verify", str(tmp_path / "x.bundle"), "--no-run"]) == 0
    capsys.readouterr()
    library = tmp_path / "x.bundle" / "lib" / "cuda-sm_90a.so"
    library.write_bytes(library.read_bytes()[:-1] + b"!")
    assert run(["verify", str(tmp_path / "x.bundle"), "--no-run"]) == 5
    assert "lib/cuda-sm_90a.so is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("shared", [{"cuda-sm_80": "matrix"}, {"cuda-sm_80": [1]}, {"../x": ["matrix"]},
                                    {"gone": ["matrix"]}, {"cuda-sm_80": ["matrix", "nothing"]}, []])
def test_shared_parameters_that_are_not_there(tmp_path: Path, shared: object) -> None:
    path = tmp_path / "x.bundle"
    write(path, [OLD_GPU, GPU], {"bias": np.ones(5, np.float32)})
    value = json.loads((path / MANIFEST).read_bytes())
    value["targets"][1]["shared_params"] = shared
    (path / MANIFEST).write_text(json.dumps(value))
    with pytest.raises((DamagedMemberError, UnsafeMemberError)):
        bundle = Bundle.open(path)
        bundle.open_params(bundle.manifest.targets[1])
