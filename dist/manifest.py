"""`Manifest`: the member that describes the others, as frozen dataclasses and one canonical JSON form.

Readers check `format_version` before anything else. Fields this version does not know are kept and written back.
The meaning of every field is in docs/artifact_format.md; this module does not open files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from relaxpack.dist.integrity import MAX_MEMBERS, canonical_json, check_member_name, parse_json
from relaxpack.errors import DamagedMemberError, NewerFormatError, NotABundleError
from relaxpack.model_info import FP8, KV_DTYPES, ModelInfo
from relaxpack.spread_costs import SpreadCosts
from relaxpack.target import TargetSpec

FORMAT_VERSION = 3      # the newest this relaxpack reads; it writes the oldest that says all (`Manifest.oldest_format`)
MANIFEST = "manifest.json"
Json = dict[str, Any]
_PLANNED = {"arena_bytes", "weight_bytes", "eager_bytes"}      # numbers of a memory plan that a runtime reads


@dataclass(frozen=True)
class Member:
    """Size in bytes and SHA-256 of one member."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class WeightsSummary:
    """`formats` counts the bytes stored per weight format name, e.g. {"q4_1": 91000000, "f32": 70000}."""

    formats: Mapping[str, int]
    extra: Json = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.formats.values())

    def to_json(self) -> Json:
        return _merge({"formats": dict(self.formats), "bytes": self.bytes}, self.extra)

    @classmethod
    def from_json(cls, data: Json) -> WeightsSummary:
        known = cls({str(k): int(v) for k, v in _get(data, "formats", dict).items()})
        return replace(known, extra=_unknown(data, known.to_json()))


@dataclass(frozen=True)
class TargetEntry:
    """Everything built for one target."""

    target: TargetSpec
    library: str                        # member, e.g. "lib/cpu-znver4.so"
    params: str                         # stem: its own shards are params/<stem>/*.safetensors
    param_order: tuple[str, ...]        # tensor names in the order of the functions' `params` tuple
    functions: tuple[str, ...]          # exported functions, e.g. ("prefill", "decode")
    symbolic_bounds: Mapping[str, int]  # symbolic variable → its largest value, e.g. {"t": 512, "b": 8}
    buckets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # function → sizes that code exists for
    memory_plan: Mapping[str, Any] = field(default_factory=dict)          # {"arena_bytes": int, ...}
    kernels: Mapping[str, int] = field(default_factory=dict)  # "tuned" | "rule" | "dlight" | ... → kernels
    tuning_records: tuple[str, ...] = ()
    activation_dtype: str | None = None   # None: as in model_info (bundles of older writers)
    kv_dtype: str | None = None
    shared_params: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # other stem → tensors taken from it
    explain: str = "explain.json"         # member: what the compiler did for this target
    canary: Mapping[str, Any] = field(default_factory=dict)     # dist.canary.CanaryOrigin
    libraries: Mapping[str, Any] = field(default_factory=dict)  # library that kernels call → what of it is needed
    activations: str | None = None        # "fp8": products of fp8 weights and many rows round activations to it
    spread: Mapping[str, Mapping[str, float]] = field(default_factory=dict)     # bucket → SpreadCosts
    step_interface: int | None = None     # relaxpack.step_interface's number; None: built before there were numbers
    extra: Json = field(default_factory=dict)

    def to_json(self) -> Json:
        known = {"target": self.target.to_json(), "library": self.library, "params": self.params,
                 "param_order": list(self.param_order), "functions": list(self.functions),
                 "symbolic_bounds": dict(self.symbolic_bounds),
                 "buckets": {name: list(sizes) for name, sizes in self.buckets.items()},
                 "memory_plan": dict(self.memory_plan), "kernels": dict(self.kernels),
                 "tuning_records": list(self.tuning_records), "explain": self.explain}
        optional = {"activation_dtype": self.activation_dtype, "kv_dtype": self.kv_dtype,
                    "shared_params": {stem: list(names) for stem, names in self.shared_params.items()},
                    "canary": dict(self.canary), "libraries": dict(self.libraries),
                    "activations": self.activations,
                    "spread": {rows: dict(costs) for rows, costs in self.spread.items()},
                    "step_interface": self.step_interface}
        return _merge({**known, **{name: value for name, value in optional.items() if value}}, self.extra)

    @classmethod
    def from_json(cls, data: Json) -> TargetEntry:
        known = cls(TargetSpec.from_json(_get(data, "target", dict)), check_member_name(_get(data, "library", str)),
                    check_member_name(_get(data, "params", str)), _names(data["param_order"], "param_order"),
                    _names(data["functions"], "functions"),
                    {symbol: _size(size, "symbolic_bounds") for symbol, size in _get(data, "symbolic_bounds", dict).items()},
                    {name: _sizes(sizes, "buckets") for name, sizes in _get(data, "buckets", dict, {}).items()},
                    _plan(_get(data, "memory_plan", dict, {})), _get(data, "kernels", dict, {}),
                    _names(_get(data, "tuning_records", list, []), "tuning_records"),
                    _dtype(data, "activation_dtype"), _one_of(data, "kv_dtype", tuple(KV_DTYPES.values())),
                    {check_member_name(stem): _names(names, "shared_params")
                     for stem, names in _get(data, "shared_params", dict, {}).items()},
                    check_member_name(_get(data, "explain", str, "explain.json")),
                    _get(data, "canary", dict, {}), _get(data, "libraries", dict, {}),
                    _one_of(data, "activations", ("fp8",)), _spread(_get(data, "spread", dict, {})),
                    _number(data, "step_interface"))
        return replace(known, extra=_unknown(data, known.to_json()))


@dataclass(frozen=True)
class Manifest:
    """The whole description. `members` is filled by `BundleWriter.finish`."""

    relaxpack_version: str
    key: str                            # dist.key: hash of everything that determines the artifact
    model_info: ModelInfo
    weights: WeightsSummary
    targets: tuple[TargetEntry, ...]
    compiler: Mapping[str, str]         # package → version
    source: Mapping[str, Any]           # where the checkpoint came from, e.g. {"name": "smollm2", "kind": "gguf"}
    build_options: Mapping[str, Any]
    members: Mapping[str, Member] = field(default_factory=dict)
    format_version: int = 1
    extra: Json = field(default_factory=dict)

    def oldest_format(self) -> int:
        """The oldest format that describes this bundle. Format 2 knows no e4m3 pages; format 1 one pair of dtypes for all
        targets, parameters of a target in one stem, and no libraries that kernels call."""
        if any(self.info_for(entry).kv_dtype == FP8 for entry in self.targets):
            return 3
        own = any((entry.activation_dtype or self.model_info.activation_dtype) != self.model_info.activation_dtype
                  or (entry.kv_dtype or self.model_info.kv_dtype) != self.model_info.kv_dtype
                  or entry.shared_params or entry.libraries
                  for entry in self.targets)
        return 2 if own else 1

    def info_for(self, entry: TargetEntry) -> ModelInfo:
        """The model as one of the targets runs it."""
        return replace(self.model_info, activation_dtype=entry.activation_dtype or self.model_info.activation_dtype,
                       kv_dtype=entry.kv_dtype or self.model_info.kv_dtype)

    def to_json(self) -> Json:
        known = {"format_version": self.format_version, "relaxpack_version": self.relaxpack_version,
                 "key": self.key, "model_info": self.model_info.to_json(), "weights": self.weights.to_json(),
                 "targets": [entry.to_json() for entry in self.targets], "compiler": dict(self.compiler),
                 "source": dict(self.source), "build_options": dict(self.build_options),
                 "members": {n: {"bytes": m.bytes, "sha256": m.sha256} for n, m in self.members.items()}}
        return _merge(known, self.extra)

    def to_bytes(self) -> bytes:
        """Canonical JSON, `format_version` first. Equal manifests give equal bytes."""
        return canonical_json(self.to_json(), first="format_version")

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises NotABundleError, NewerFormatError, UnsafeMemberError or DamagedMemberError."""
        return cls.from_json(parse_json(MANIFEST, data))

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        version = data.get("format_version") if isinstance(data, dict) else None
        if type(version) is not int or version < 1:
            raise NotABundleError(f"{MANIFEST} has no format_version: this is not a relaxpack bundle")
        if version > FORMAT_VERSION:
            raise NewerFormatError(f"bundle format {version} is newer than this relaxpack reads ({FORMAT_VERSION}); it "
                                   f"was written by relaxpack {data.get('relaxpack_version', '?')}: install that or "
                                   "newer")
        try:
            members = _get(data, "members", dict)
            if len(members) > MAX_MEMBERS:
                raise DamagedMemberError(f"{MANIFEST} names {len(members)} members, more than {MAX_MEMBERS}")
            known = cls(_get(data, "relaxpack_version", str), _get(data, "key", str),
                        ModelInfo.from_json(_get(data, "model_info", dict)),
                        WeightsSummary.from_json(_get(data, "weights", dict)),
                        tuple(TargetEntry.from_json(entry) for entry in _get(data, "targets", list)),
                        _get(data, "compiler", dict), _get(data, "source", dict), _get(data, "build_options", dict),
                        {check_member_name(name): _member(name, entry) for name, entry in members.items()},
                        version)
            if not known.targets:
                raise ValueError("it has no targets")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedMemberError(f"{MANIFEST} is damaged: {type(error).__name__}: {error}") from None
        return replace(known, extra=_unknown(data, known.to_json()))


def _member(name: str, entry: Json) -> Member:
    size, digest = _get(entry, "bytes", int), _get(entry, "sha256", str)
    if size < 0 or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise DamagedMemberError(f"{MANIFEST} is damaged: bad size or digest of member {name}")
    return Member(size, digest)


def _names(values: Any, key: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{key} is not a list of names")
    return tuple(values)


def _size(value: Any, key: str, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{key}: {value!r} is no size")
    return value


def _sizes(values: Any, key: str, least: int = 1) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{key}: {values!r} is no list of sizes")
    return tuple(_size(value, key, least) for value in values)


def _plan(data: Json) -> Json:
    for name in _PLANNED & data.keys():
        _size(data[name], f"memory_plan: {name}", 0)
    _sizes(data.get("arena_storages", []), "memory_plan: arena_storages", 0)
    return data


def _dtype(data: Json, key: str) -> str | None:
    return _get(data, key, str) if key in data else None


def _one_of(data: Json, key: str, known: tuple[str, ...]) -> str | None:
    value = _dtype(data, key)
    if value not in (None, *known):
        raise ValueError(f"{key} is {value!r}, expected one of {', '.join(known)}")
    return value


def _number(data: Json, key: str) -> int | None:
    return _size(data[key], key) if key in data else None


def _spread(data: Json) -> Json:
    names = {field.name for field in fields(SpreadCosts)}
    for rows, costs in data.items():
        if not rows.isdecimal() or not isinstance(costs, dict) or costs.keys() != names \
                or any(type(value) not in (int, float) for value in costs.values()):
            raise TypeError(f"spread gives no costs for a bucket: {rows!r}: {costs!r}")
    return data


def _get(data: Json, key: str, kind: type, default: Any = None) -> Any:
    value = data.get(key, default) if default is not None else data[key]
    if type(value) is not kind:
        raise TypeError(f"{key} is {type(value).__name__}, expected {kind.__name__}")
    return value


def _unknown(given: Json, known: Json) -> Json:
    """What of `given` does not stand in `known`, objects inside objects included."""
    rest: Json = {}
    for key, value in given.items():
        if key not in known:
            rest[key] = value
        elif isinstance(value, dict) and isinstance(known[key], dict) and (inner := _unknown(value, known[key])):
            rest[key] = inner
    return rest


def _merge(known: Json, extra: Json) -> Json:
    result = {**extra, **known}
    for key in known.keys() & extra.keys():
        if isinstance(known[key], dict) and isinstance(extra[key], dict):
            result[key] = _merge(known[key], extra[key])
    return result
