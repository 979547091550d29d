"""The manifest's one byte form, what it keeps, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from relaxpack.dist.manifest import FORMAT_VERSION, Manifest, Member
from relaxpack.errors import DamagedMemberError, NewerFormatError, NotABundleError, UnsafeMemberError
from tests.helpers.bundles import make_manifest, target_entry

MANIFEST = replace(make_manifest(target_entry(["a", "b.codes"])), members={"lib/x.so": Member(3, "ab" * 32)})


def changed(**values: Any) -> bytes:
    return json.dumps({**json.loads(MANIFEST.to_bytes()), **values}).encode()


def test_round_trip_and_canonical_form() -> None:
    data = MANIFEST.to_bytes()
    assert data.startswith(b'{\n  "format_version": 1,\n  "build_options"') and data.endswith(b"}\n")
    assert Manifest.from_bytes(data) == MANIFEST
    backwards = json.dumps(dict(reversed(json.loads(data).items()))).encode()
    assert Manifest.from_bytes(backwards).to_bytes() == data, "the order of keys does not matter"


def test_unknown_fields_are_kept() -> None:
    value = json.loads(MANIFEST.to_bytes())
    value["later"] = {"x": [1, 2]}
    value["model_info"]["rope"] = "new"
    value["weights"]["note"] = "n"
    value["targets"][0]["speed"] = 3
    value["targets"][0]["target"]["tune"] = "z"
    manifest = Manifest.from_bytes(json.dumps(value).encode())
    assert json.loads(manifest.to_bytes()) == value
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_newer_format_is_refused_by_name_whatever_else_it_holds() -> None:
    data = json.dumps({"format_version": FORMAT_VERSION + 1, "relaxpack_version": "9.1", "targets": "other"}).encode()
    with pytest.raises(NewerFormatError, match=f"format {FORMAT_VERSION + 1} is newer.*relaxpack 9.1"):
        Manifest.from_bytes(data)


@pytest.mark.parametrize("data", [b"[]", b"{}", b'{"format_version": "1"}', b'{"format_version": true}',
                                  b'{"format_version": 0}'])
def test_no_format_version_is_not_a_bundle(data: bytes) -> None:
    with pytest.raises(NotABundleError):
        Manifest.from_bytes(data)


@pytest.mark.parametrize("data", [
    b"", b"\xff", b"{", b'{"format_version": 1}', b'{"format_version": 1, "format_version": 1}',
    b'{"format_version": NaN}', b"[" * 100_000,
    changed(members=[]), changed(members={"a": 1}), changed(members={"a": {"bytes": -1, "sha256": "ab" * 32}}),
    changed(members={"a": {"bytes": 1, "sha256": "AB" * 32}}),
    changed(members={"a": {"bytes": True, "sha256": "ab" * 32}}),
    changed(targets=[]), changed(targets=[{}]), changed(targets=[3]), changed(model_info={}), changed(weights=None),
    changed(key=5),
], ids=range(18))
def test_damage(data: bytes) -> None:
    with pytest.raises(DamagedMemberError, match="manifest.json is damaged"):
        Manifest.from_bytes(data)


@pytest.mark.parametrize("change", [
    {"kv_dtype": "bogus"}, {"kv_dtype": "fp8"}, {"activations": "bogus"}, {"spread": {"8": {}}}, {"spread": {"x": {}}},
    {"spread": {"8": 3}}, {"step_interface": 0}, {"step_interface": "1"}, {"symbolic_bounds": {"t": "64"}},
    {"symbolic_bounds": {"t": 0}}, {"buckets": {"decode": "124"}}, {"buckets": {"decode": [1, "2"]}},
    {"functions": "decode"}, {"param_order": [1]}, {"tuning_records": [None]}, {"memory_plan": {"arena_bytes": "4096"}},
    {"memory_plan": {"arena_storages": [1.5]}}, {"memory_plan": {"weight_bytes": -1}},
    {"spread": {"8": {"longest_us": "1", "key_us": 1, "again_us": 1, "shared_us": 1, "more_us": 1}}}])
def test_facts_of_a_target_that_make_no_sense_are_damage(change: dict[str, Any]) -> None:
    (target,) = json.loads(MANIFEST.to_bytes())["targets"]
    with pytest.raises(DamagedMemberError, match="manifest.json is damaged"):
        Manifest.from_bytes(changed(targets=[{**target, **change}]))


@pytest.mark.parametrize("change", [
    {"max_context": -5}, {"page_size": "x"}, {"page_size": 0}, {"vocab_size": True}, {"max_batch": 1 << 40}, {"name": None},
    {"kv_dtype": 3}, {"kv_dtype": "fp8"}, {"end_token_ids": 2}, {"end_token_ids": ["2"]}, {"bos_token_id": 10**9},
    {"add_bos": "no"}])
def test_model_facts_that_make_no_sense_are_damage(change: dict[str, Any]) -> None:
    info = json.loads(MANIFEST.to_bytes())["model_info"]
    for data in (changed(model_info={**info, **change}),
                 changed(model_info={k: v for k, v in info.items() if k not in change})):
        with pytest.raises(DamagedMemberError, match="manifest.json is damaged"):
            Manifest.from_bytes(data)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a//b", "a/./b", "a/../b", "", ".", ".hidden", "a\\b", "C:x",
                                  "-x", "a\x00b", "a\nb", "é", "a" * 300, "a/"])
def test_unsafe_member_names(name: str) -> None:
    with pytest.raises(UnsafeMemberError):
        Manifest.from_bytes(changed(members={name: {"bytes": 1, "sha256": "ab" * 32}}))


def test_unsafe_names_in_targets() -> None:
    for field in ("library", "params"):
        entry = {**json.loads(MANIFEST.to_bytes())["targets"][0], field: "../../x"}
        with pytest.raises(UnsafeMemberError):
            Manifest.from_bytes(changed(targets=[entry]))
