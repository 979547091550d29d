"""`TuningRecord`: what was found for one workload on one target with one compiler, in plain form. Knows neither TVM nor
files: `relaxpack.dist.tuning` stores, merges and shares records, `relaxpack.tuning` makes, applies and verifies them.

- **Key**: (workload hash, bucket, target hash, compiler hash). A look-up by key never answers with a record of another
  target or compiler; `relaxpack.fingerprint` makes the two mappings that are hashed.
- **Id**: SHA-256 of the canonical JSON of everything but the status. A record never changes: a new measurement is a new
  record. A good record has a numeric check that passed; a candidate that failed it is not stored.
- **Status** only goes up: good < stale < failed (`joined`). "stale": its time was not reproduced or its trace no longer
  loads; "failed": its numbers are wrong or it does not build. Nothing makes a marked record good again; what a
  verification finds to be fine is stored as a record of its own, made with `remeasured`. So records can be merged in any
  order (docs/tuning_database.md).
- **Another compiler's records** stay good for those who run that compiler; they are never looked up here, and are shown
  as stale. `remeasured(compiler=...)` brings one over once it has been verified.
- `relaxpack db verify` calls `relaxpack.tuning.verify.verify(record, retime=True) -> Verdict` for every record of this
  machine's targets, those of other compilers and imported ones included.
- Workload hashes of kind "primfunc" are TVM's 64-bit structural hashes. Who applies a record compares its
  `workload.text` with the function at hand (`structural_equal`) first.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from relaxpack.errors import DamagedRecordError

Fact: TypeAlias = str | int | float | bool | None
Facts: TypeAlias = Mapping[str, Fact | tuple[Fact, ...]]   # a flat mapping; JSON lists become tuples
Status: TypeAlias = Literal["good", "stale", "failed"]

STATUSES: tuple[Status, ...] = ("good", "stale", "failed")   # in the order in which they win
RECORD_VERSION = 1
# What a target fingerprint must say at least; anything more counts into its hash as well.
TARGET_FACTS = {"cpu": ("arch", "features", "threads"), "cuda": ("arch", "sm_count", "l2_bytes", "memory_gib")}
COMPILER_FACTS = ("apache-tvm", "kernels")
CONDITIONS = ("repeats", "rotated_bytes")
_MOST_ROWS, _LARGEST, _LONGEST_REASON = 1 << 31, 1e300, 500
_CHOICES = {"trace": ("trace",), "parameters": ("parameters",), "library": ("library", "parameters")}


def canonical(value: Any) -> str:
    """The one JSON form that is hashed: ASCII, keys sorted, no spaces, no NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} in a tuning record")


@dataclass(frozen=True)
class Workload:
    """What is computed. Kind "kernel" is one of our parametrised kernels: `text` is canonical JSON (`Workload.kernel`
    makes it) and `hash` its SHA-256. Kind "primfunc" is a TVM function: `text` is base64 of TVM's save_json of an IRModule
    whose only function is `main`, `hash` its structural hash in decimal (`relaxpack.tvm_records.primfunc_workload` makes
    both, `workload_module` and `scheduled` read them). `name` is for people."""

    kind: Literal["kernel", "primfunc"]
    name: str
    hash: str
    text: str

    def __post_init__(self) -> None:
        _require(self.kind in ("kernel", "primfunc"), f'workload.kind is {self.kind!r}, not "kernel" or "primfunc"')
        for name in ("name", "hash", "text"):
            value = getattr(self, name)
            _require(_is_text(value) and value != "", f"workload.{name} is {_shown(value)}, not a text")
        if self.kind == "kernel":
            made = hashlib.sha256(self.text.encode()).hexdigest()
            _require(made == self.hash, f"workload.hash {self.hash[:16]} is not the SHA-256 of workload.text ({made[:16]})")
        else:
            _require(self.hash.isascii() and self.hash.lstrip("-").isdigit(),
                     f"workload.hash is {_shown(self.hash)}, not a structural hash in decimal")

    @property
    def told(self) -> dict[str, Any]:
        """What the text says of a parametrised kernel; nothing where there is none."""
        try:
            told = json.loads(self.text) if self.kind == "kernel" else {}
        except (ValueError, RecursionError):        # somebody else's record may hold any text
            return {}
        return told if isinstance(told, dict) else {}

    @property
    def family(self) -> str:
        """Of the parametrised kernel; "" where there is none."""
        return str(self.told.get("family", ""))

    @classmethod
    def kernel(cls, family: str, spec: Any, name: str | None = None) -> Workload:
        """`family` names the parametrised kernel ("cuda.gemv"), `spec` is its dataclass out of kernel_spec. Leave out of
        the spec what the record's bucket says."""
        if hasattr(spec, "__dataclass_fields__"):
            spec = spec.recorded() if hasattr(spec, "recorded") else asdict(spec)
        text = canonical({"family": family, "spec": spec})
        return cls("kernel", name or family, hashlib.sha256(text.encode()).hexdigest(), text)


@dataclass(frozen=True)
class Check:
    """The numeric check of the winner against the untuned function on random inputs of `seed`."""

    seed: int
    max_error: float
    tolerance: float

    def __post_init__(self) -> None:
        _require(_is_int(self.seed), f"check.seed is {_shown(self.seed)}, not a whole number")
        for name in ("max_error", "tolerance"):
            object.__setattr__(self, name, _number(getattr(self, name), f"check.{name}"))
        _require(self.max_error <= self.tolerance,
                 f"check.max_error {self.max_error} is above check.tolerance {self.tolerance}: the check failed")


@dataclass(frozen=True)
class Origin:
    """Where a record comes from. `created` is UTC, "2026-11-29T20:15:00Z"; `tool` e.g. "relaxpack 0.1.0" or "import of TVM
    JSON"; `parent` is the id of the record this one measures again."""

    created: str
    host: str
    tool: str
    trials: int
    parent: str | None = None

    def __post_init__(self) -> None:
        for name in ("created", "host", "tool"):
            value = getattr(self, name)
            _require(_is_text(value), f"origin.{name} is {_shown(value)}, not a text")
        _require(_is_int(self.trials) and self.trials >= 0, f"origin.trials is {_shown(self.trials)}, not a count")
        _require(self.parent is None or isinstance(self.parent, str), f"origin.parent is {_shown(self.parent)}, not an id")


class RecordKey(NamedTuple):
    workload: str        # hash
    bucket: int | None
    target: str          # hash of the fingerprint
    compiler: str        # hash


@dataclass(frozen=True)
class TuningRecord:
    workload: Workload
    bucket: int | None           # rows this was tuned for; None where the workload has no row count
    target: Facts                # see TARGET_FACTS
    compiler: Facts              # see COMPILER_FACTS
    choice: Mapping[str, Any]    # {"kind": "trace", "trace": [instructions, decisions]}
                                 # {"kind": "parameters", "parameters": {name: fact}}
                                 # {"kind": "library", "library": "cublaslt", "parameters": {name: fact}}
    times_us: tuple[float, ...]  # every repeat, as measured
    conditions: Facts            # see CONDITIONS; further e.g. clock_mhz, threads, warmup
    check: Check | None          # a good record has one; what was imported without one is stale
    origin: Origin
    baseline_us: float | None = None   # median of the untuned schedule under the same conditions
    status: Status = "good"
    reason: str = ""             # why it is not good

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name, kind in (("workload", Workload), ("check", Check), ("origin", Origin)):
            value = getattr(self, name)
            _require(isinstance(value, kind) or (name == "check" and value is None and self.status != "good"),
                     f"{name} of a {self.status} record is {_shown(value)}, not a {kind.__name__}")
        _require(self.bucket is None or (_is_int(self.bucket) and 0 < self.bucket <= _MOST_ROWS),
                 f"bucket is {_shown(self.bucket)}, not a number of rows")
        put("target", _facts(self.target, "target"))
        wanted = TARGET_FACTS.get(str(self.target.get("kind")))
        _require(wanted is not None,
                 f"target.kind is {_shown(self.target.get('kind'))}, not one of {', '.join(TARGET_FACTS)}")
        _has(self.target, wanted or (), "target")
        put("compiler", _facts(self.compiler, "compiler"))
        _has(self.compiler, COMPILER_FACTS, "compiler")
        put("conditions", _facts(self.conditions, "conditions"))
        _has(self.conditions, CONDITIONS, "conditions")
        put("choice", _choice(self.choice))
        _require(isinstance(self.times_us, (list, tuple)) and len(self.times_us) > 0,
                 f"times_us is {_shown(self.times_us)}, not a list of at least one time")
        put("times_us", tuple(_number(time, f"times_us[{i}]", positive=True) for i, time in enumerate(self.times_us)))
        if self.baseline_us is not None:
            put("baseline_us", _number(self.baseline_us, "baseline_us", positive=True))
        _require(self.status in STATUSES, f"status is {_shown(self.status)}, not one of {', '.join(STATUSES)}")
        _require(_is_text(self.reason), f"reason is {_shown(self.reason)}, not a text")
        _require(self.status != "good" or not self.reason, f"a good record has a reason: {_shown(self.reason)}")

    def __hash__(self) -> int:
        return hash(self.id)

    @cached_property
    def id(self) -> str:
        return digest(self.content())

    @cached_property
    def key(self) -> RecordKey:
        return RecordKey(self.workload.hash, self.bucket, digest(self.target), digest(self.compiler))

    @cached_property
    def median_us(self) -> float:
        return statistics.median(self.times_us)

    @cached_property
    def spread(self) -> float:
        """Half the distance between the quartiles as a fraction of the median; 0 for fewer than three repeats."""
        if len(self.times_us) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.times_us, n=4, method="inclusive")
        return (high - low) / 2 / self.median_us

    @property
    def rank(self) -> tuple[float, str]:
        """Of two good records with one key, the one with the lower rank is used: the better time, then the lower id."""
        return self.median_us, self.id

    def marked(self, status: Status, reason: str) -> TuningRecord:
        """This record with at least this status. A mark that is not higher than the one it has changes nothing."""
        return joined(self, replace(self, status=status, reason=tidy(reason)))

    def remeasured(self, *, times_us: tuple[float, ...], conditions: Facts, check: Check, origin: Origin,
                   compiler: Facts | None = None, baseline_us: float | None = None) -> TuningRecord:
        """A new, good record of the same choice measured again, here or with another compiler."""
        return replace(self, times_us=times_us, conditions=conditions, check=check, baseline_us=baseline_us,
                       compiler=self.compiler if compiler is None else compiler,
                       origin=replace(origin, parent=self.id), status="good", reason="")

    def content(self) -> dict[str, Any]:
        """What the id is the digest of: JSON-ready, without status and reason."""
        return {"version": RECORD_VERSION, "workload": asdict(self.workload), "bucket": self.bucket,
                "target": dict(self.target), "compiler": dict(self.compiler), "choice": dict(self.choice),
                "times_us": list(self.times_us), "baseline_us": self.baseline_us, "conditions": dict(self.conditions),
                "check": None if self.check is None else asdict(self.check), "origin": asdict(self.origin)}

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, **self.content(), "status": self.status, "reason": self.reason}

    @classmethod
    def from_json(cls, data: Any) -> TuningRecord:
        """Raises DamagedRecordError for a missing, unknown or wrong field and for an id that is not that of the content."""
        known = {field.name for field in fields(cls)} | {"id", "version"}
        _fields(data, known, "the record")
        _require(_is_int(data["version"]), f"version is {_shown(data['version'])}, not a whole number")
        _require(data["version"] == RECORD_VERSION,
                 f"record of version {data['version']}, this relaxpack reads version {RECORD_VERSION}; upgrade relaxpack")
        values = {name: data[name] for name in known - {"id", "version"}}
        for name, part in (("workload", Workload), ("check", Check), ("origin", Origin)):
            if name != "check" or values[name] is not None:
                _fields(values[name], {field.name for field in fields(part)}, name)
                values[name] = part(**values[name])
        record = cls(**values)
        _require(record.id == data["id"],
                 f"the id {_shown(data['id'])} is not that of the content, {record.id[:16]}...: damaged")
        return record


class Damaged(NamedTuple):
    """Something that should have been a record."""

    where: str       # its id, or file and line
    problem: str


class Verdict(NamedTuple):
    """What verifying a record found. "good" with `renewed` None: it is as it says. "stale" or "failed": how to mark it
    and why. `renewed` is a record to add, made with `remeasured`: of this compiler, or with the time measured now."""

    status: Status
    reason: str = ""
    renewed: TuningRecord | None = None


def tidy(reason: str) -> str:
    """A reason, which may be a compiler's outcry, as one line that every database can store."""
    line = " ".join(reason.replace("\0", " ").split()).encode(errors="replace").decode()
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON - 3] + "..."


def joined(a: TuningRecord, b: TuningRecord) -> TuningRecord:
    """Two copies of one record: the higher status wins, of equal ones the reason that sorts first."""
    assert a.id == b.id, f"{a.id} and {b.id} are two records"
    order = {status: -index for index, status in enumerate(STATUSES)}
    return min(a, b, key=lambda record: (order[record.status], record.reason))


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise DamagedRecordError(problem)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    """A text that every database can store: no NUL, no half of a surrogate pair."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(value: Any, what: str, positive: bool = False) -> float:
    good = (isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST
            and (value > 0 if positive else value >= 0))
    _require(good, f"{what} is {_shown(value)}, not a {'positive ' if positive else ''}finite number"
                   f"{'' if positive else ' of at least 0'}")
    return float(value)


def _fields(data: Any, known: set[str], what: str) -> None:
    _require(isinstance(data, dict), f"{what} is {_shown(data)}, not an object")
    if missing := sorted(known - data.keys()):
        raise DamagedRecordError(f"{what} lacks {', '.join(missing)}")
    if unknown := sorted(data.keys() - known):
        raise DamagedRecordError(f"{what} has unknown fields: {', '.join(map(_shown, unknown))}")


def _has(facts: Facts, wanted: tuple[str, ...], what: str) -> None:
    missing = [name for name in wanted if name not in facts]
    _require(not missing, f"{what} lacks {', '.join(missing)}")


def _is_fact(value: Any) -> bool:
    return value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value))


def _facts(value: Any, what: str) -> dict[str, Any]:
    _require(isinstance(value, Mapping), f"{what} is {_shown(value)}, not an object")
    facts = {}
    for name, fact in value.items():
        fact = tuple(fact) if isinstance(fact, list) else fact
        fits = all(map(_is_fact, fact)) if isinstance(fact, tuple) else _is_fact(fact)
        _require(isinstance(name, str) and fits, f"{what}.{name} is {_shown(fact)}, not a plain value or a list of them")
        facts[name] = fact
    return facts


def _choice(value: Any) -> dict[str, Any]:
    _require(isinstance(value, Mapping), f"choice is {_shown(value)}, not an object")
    kind = value.get("kind")
    _require(isinstance(kind, str) and kind in _CHOICES, f"choice.kind is {_shown(kind)}, not one of {', '.join(_CHOICES)}")
    choice = dict(value)
    if kind == "library":
        choice.setdefault("parameters", {})
    _fields(choice, {"kind", *_CHOICES[kind]}, "choice")
    if kind == "trace":
        try:
            choice["trace"] = json.loads(canonical(choice["trace"]))   # lists for tuples, and nothing JSON lacks
        except (TypeError, ValueError, RecursionError) as error:
            raise DamagedRecordError(f"choice.trace is not JSON: {error}") from None
        _require(isinstance(choice["trace"], list) and len(choice["trace"]) == 2,
                 "choice.trace is not a pair of instructions and decisions")
    else:
        choice["parameters"] = _facts(choice["parameters"], "choice.parameters")
    if kind == "library":
        _require(isinstance(choice["library"], str) and choice["library"] != "",
                 f"choice.library is {_shown(choice['library'])}, not a name")
    return choice
