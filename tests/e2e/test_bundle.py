"""A built bundle as a thing on disk: equal builds give equal bytes, what it says about itself is true, and a damaged one
is refused by name. Running it on a TVM without a compiler is test_deployed.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxpack.cli import run
from relaxpack.compile import BuildOptions, build_bundle
from relaxpack.dist.bundle import Bundle
from relaxpack.dist.canary import CanarySet
from relaxpack.dist.manifest import FORMAT_VERSION
from relaxpack.errors import BundleError
from relaxpack.runtime.canaries import check
from relaxpack.runtime.load import load_model
from relaxpack.step_interface import STEP_INTERFACE
from tests.helpers.numerics import prefill_logits, tapes
from tests.helpers.tiny_checkpoints import write_checkpoint

OPTIONS = {"--weights": "q8", "--max-context": "64", "--max-batch": "2", "--prefill-chunk": "32"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", "llama_bias", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def bundle_path(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "first.bundle"
    build_bundle(checkpoint, path, options=BuildOptions(
        weights="q8", max_context=64, max_batch=2, prefill_chunk=32))
    return path


@pytest.fixture
def copy(bundle_path: Path, tmp_path: Path) -> Path:
    shutil.copytree(bundle_path, tmp_path / "copy.bundle")
    return tmp_path / "copy.bundle"


def test_equal_builds_give_equal_bytes(checkpoint: Path, bundle_path: Path, tmp_path: Path) -> None:
    """Another process with another hash seed, another place and another temporary folder."""
    (tmp_path / "elsewhere").mkdir()
    second = tmp_path / "second.bundle"
    options = [word for pair in OPTIONS.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-m", "relaxpack", "build", str(checkpoint), "-o", str(second), *options],
        env={**os.environ, "PYTHONHASHSEED": "12345", "TMPDIR": str(tmp_path / "elsewhere")},
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    one, other = Bundle.open(bundle_path, verify="full"), Bundle.open(second, verify="full")
    different = [name for name in one.manifest.members
                 if one.manifest.members[name].sha256 != other.manifest.members[name].sha256]
    assert set(one.manifest.members) == set(other.manifest.members) and not different
    assert (bundle_path / "manifest.json").read_bytes() == (second / "manifest.json").read_bytes()


def test_no_path_of_the_building_machine_is_inside(bundle_path: Path, checkpoint: Path) -> None:
    secret = [str(checkpoint.parent).encode(), str(bundle_path.parent).encode(), str(Path.cwd()).encode()]
    for file in sorted(p for p in bundle_path.rglob("*") if p.is_file()):
        data = file.read_bytes()
        assert not [path for path in secret if path in data], file.name


def test_what_it_says_about_itself(bundle_path: Path) -> None:
    bundle = Bundle.open(bundle_path, verify="full")
    manifest, (entry,) = bundle.manifest, bundle.manifest.targets
    info = manifest.model_info
    assert (info.architecture, info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == ("llama", 2, 4, 2, 16)
    assert (info.max_context, info.max_batch, info.prefill_chunk, info.page_size) == (64, 2, 32, 16)
    assert set(entry.functions) == {"prefill", "decode"}
    assert entry.library in manifest.members
    explanation = bundle.read_json("explain.json")
    assert [p["phase"] for p in explanation["phases"]] == ["graph", "weights", "fuse", "lower", "finalize", "code"]
    plans = explanation["memory_plan"]
    assert set(plans) == {"prefill", "decode"} and all(plan["tensors"] for plan in plans.values())
    assert entry.memory_plan["arena_bytes"] == max(plan["bytes"] for plan in plans.values())
    called = {call["kernel"] for calls in explanation["calls"].values() for call in calls}
    assert called <= {kernel["name"] for kernel in explanation["kernels"]}
    assert sum(entry.kernels.values()) == len(explanation["kernels"])


def test_a_tied_table_is_stored_once(bundle_path: Path) -> None:
    """Embedding and head are one quantised tensor: it is packed, stored and mapped once."""
    bundle = Bundle.open(bundle_path)
    (entry,) = bundle.manifest.targets
    tables = [name for name in entry.param_order if "embed_tokens" in name]
    assert not [name for name in entry.param_order if "lm_head" in name]
    assert {name.split("@")[0] for name in tables} == {"model.embed_tokens.weight"}
    stored = dict(bundle.params(entry.params))
    assert len(tables) == len(set(tables)) and set(tables) <= set(stored)
    table_bytes = sum(array.nbytes for name, array in stored.items() if name in tables)
    assert table_bytes <= 512 * 64 * (1 + 2 / 32) * 1.1   # q8_0: a byte and a sixteenth each, and little padding


def test_the_canaries_of_a_moved_bundle_pass(copy: Path) -> None:
    model = load_model(copy)
    canaries = CanarySet.from_bytes(model.bundle.read("canary.json"))
    reports = list(check(model.runner, canaries))
    assert len(reports) == 3 and all(report.ok for report in reports)


def members(path: Path) -> dict[str, Path]:
    return {p.relative_to(path).as_posix(): p for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", ["library", "params", "tokenizer", "manifest"])
def test_a_flipped_bit_is_refused(copy: Path, kind: str) -> None:
    wanted = {"library": ".so", "params": ".safetensors", "tokenizer": "tokenizer.json", "manifest": "manifest.json"}[kind]
    (name,) = [n for n in members(copy) if n.endswith(wanted)]
    data = bytearray((copy / name).read_bytes())
    # The manifest vouches for the others and nothing for it: a bit of a key it must have is missed, others need not be.
    at = data.index(b'"param_order"') + 3 if kind == "manifest" else len(data) // 2
    data[at] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(BundleError) as caught:
        Bundle.open(copy, verify="full")
    assert name.rsplit("/", 1)[-1] in str(caught.value) and "\n" not in str(caught.value)


def test_a_damaged_library_is_not_loaded(copy: Path) -> None:
    """Loading checks the code before it is mapped, also where not every digest is checked."""
    (name,) = [n for n in members(copy) if n.endswith(".so")]
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(BundleError, match="damaged"):
        load_model(copy)


@pytest.mark.parametrize("damage", [
    pytest.param(lambda path: path.unlink(), id="missing"),
    pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-100]), id="truncated"),
    pytest.param(lambda path: path.write_bytes(path.read_bytes() + b"x"), id="longer")])
def test_a_member_of_another_size_is_refused_at_once(copy: Path, damage: Callable[[Path], None]) -> None:
    for name in [n for n in members(copy) if n.endswith((".so", ".safetensors"))]:
        kept = (copy / name).read_bytes()
        damage(copy / name)
        with pytest.raises(BundleError, match=name.rsplit("/", 1)[-1]):
            load_model(copy)
        (copy / name).write_bytes(kept)


def test_another_cpu_and_a_newer_format_are_refused(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    newer = {**manifest, "format_version": FORMAT_VERSION + 1}
    (copy / "manifest.json").write_text(json.dumps(newer))
    with pytest.raises(BundleError, match="format"):
        load_model(copy)
    other = json.loads(json.dumps(manifest))
    other["targets"][0]["target"]["features"] = [*other["targets"][0]["target"]["features"], "amx-tile-of-the-future"]
    (copy / "manifest.json").write_text(json.dumps(other))
    with pytest.raises(BundleError, match="amx-tile-of-the-future"):
        load_model(copy)


@pytest.mark.parametrize(("fact", "value", "compiled"), [
    ("kv_dtype", "float32", "float16"), ("kv_dtype", "bfloat16", "float16"), ("kv_dtype", "float8_e4m3fn", "float16"),
    ("num_layers", 3, "2"), ("num_kv_heads", 1, "2"), ("page_size", 32, "16"), ("head_dim", 32, "16"),
    ("vocab_size", 600, "512"), ("max_context", 128, "4 pages of 16 tokens"), ("max_batch", 3, "2 (b)"),
    ("prefill_chunk", 64, "32 (t)")])
def test_a_manifest_that_the_library_contradicts_is_refused(copy: Path, fact: str, value: Any, compiled: str,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["model_info"][fact] = value
    manifest["targets"][0].update({fact: value} if fact in manifest["targets"][0] else {})
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert run(["generate", str(copy), "hi"]) == 5
    said = capsys.readouterr().err
    assert f"{copy}: manifest.json says {fact} {value}, and " in said
    assert f" for {compiled}: the manifest was changed" in said


def test_the_step_interface_is_written_and_compared(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (entry,) = manifest["targets"]
    assert entry["step_interface"] == STEP_INTERFACE["cpu"]
    entry["step_interface"] += 1
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert run(["generate", str(copy), "hi"]) == 5
    assert "with step interface" in capsys.readouterr().err
    assert run(["inspect", str(copy), "--json"]) == 0
    what = json.loads(capsys.readouterr().out)
    assert what["chosen"] is None and "with step interface" in what["targets"][0]["reasons"][0]
    del entry["step_interface"]             # as writers of before there were numbers
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert run(["generate", str(copy), "hi", "--max-tokens", "1"]) == 0


def test_a_bundle_gives_the_same_logits_each_time_it_is_loaded(bundle_path: Path) -> None:
    rows = []
    for _ in range(2):
        model = load_model(bundle_path)
        (tape,) = tapes(model.runner, [list(range(3, 40))])
        rows.append(prefill_logits(tape, 37))
    np.testing.assert_array_equal(rows[0], rows[1])
