"""Canaries: prompts with the answers the model gave when it was built, compared with those it gives here.

Prompts are token ids, so neither tokenizer nor sampling is involved. Running a model is not known here; `compare` is a
pure function of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from relaxpack.dist.integrity import canonical_json, parse_json
from relaxpack.errors import DamagedMemberError, NewerFormatError
from relaxpack.model_info import FP8

if TYPE_CHECKING:
    import numpy as np

CANARY = "canary.json"
CANARY_VERSION = 1
LOGITS, HIDDEN = "logit", "hidden state"     # what a canary's values are
# Largest accepted difference of a logit. The same library on another CPU or GPU sums in another order at most; a wrong
# layout, a lost instruction set or damaged weights are off by whole units. Formats that round activations on the way
# (to int8, or to a 16-bit float) turn a change of the last bit into a step, hence the larger values.
_TOLERANCE = {"f32": 2e-3, "f16": 5e-2, "bf16": 2e-1}
_QUANTIZED_TOLERANCE = 2e-1


def tolerance(weight_formats: Iterable[str], activation_dtype: str = "float32", kv_dtype: str = "") -> float:
    """Tolerance for logits of a model whose linear weights have these formats: the largest of theirs. e4m3 pages turn a
    change of the last bit into a step too."""
    values = [_TOLERANCE.get(name, _QUANTIZED_TOLERANCE) for name in weight_formats]
    values.append(_QUANTIZED_TOLERANCE if kv_dtype == FP8 else 0.0)
    values.append({"float32": 0.0, "float16": 5e-2, "bfloat16": 2e-1}.get(activation_dtype, _QUANTIZED_TOLERANCE))
    return max(values)


# The same for a target other than the one that answered at build: other kernels, and activations rounded to another
# dtype after every operation. SmolLM2 in bfloat16 against float32: 0.33 after a prompt, 0.8 further on; in float16 0.04
# and 0.08. A CPU rounds activations to int8 where weights are quantised: 1.6 (docs/accuracy.md).
_FOREIGN = {"float32": 5e-2, "float16": 1e-1, "bfloat16": 1.0}
_FOREIGN_QUANTIZED = 2.5


def foreign_tolerance(weight_formats: Iterable[str], activation_dtype: str, kv_dtype: str = "") -> float:
    """Tolerance for a target with these activations and pages whose answers another one gave at build, with weights in
    `weight_formats`."""
    values = [0.0 if name in _TOLERANCE else _FOREIGN_QUANTIZED for name in weight_formats]
    values.append(_FOREIGN_QUANTIZED if kv_dtype == FP8 else 0.0)
    return max([_FOREIGN.get(activation_dtype, _FOREIGN_QUANTIZED), *values])


@dataclass(frozen=True)
class CanaryOrigin:
    """What a target of a bundle is held to: the target that answered at build and the tolerance; or, where nothing was
    recorded, the reason."""

    recorded_by: str = ""
    tolerance: float = 0.0
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"reason": self.reason} if self.reason else {"recorded_by": self.recorded_by, "tolerance": self.tolerance}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CanaryOrigin | None:
        """None where nothing is said (bundles of older writers). Raises DamagedMemberError."""
        if not data:
            return None
        by, allowed, reason = data.get("recorded_by", ""), data.get("tolerance", 0.0), data.get("reason", "")
        if not (isinstance(by, str) and isinstance(reason, str) and isinstance(allowed, int | float) and (by or reason)):
            raise DamagedMemberError("manifest.json is damaged: a target's canary names no target and no reason")
        return cls(by, float(allowed), reason)


@dataclass(frozen=True)
class Canary:
    """One prompt and the answers at build time.

    `top_ids`, `top_logits`: the largest logits after the whole prompt, largest first. `greedy_ids`: the greedy
    continuation; `margins[i]`: by how much its logit led the second best (a difference there within the tolerance is
    no fault).
    """

    name: str
    prompt_ids: tuple[int, ...]
    top_ids: tuple[int, ...]
    top_logits: tuple[float, ...]
    greedy_ids: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True)
class CanarySet:
    tolerance: float
    canaries: tuple[Canary, ...]
    values: str = LOGITS        # HIDDEN: of a model that only embeds; `top_ids` are then places in the hidden state

    def to_bytes(self) -> bytes:
        kind = {} if self.values == LOGITS else {"values": self.values}
        return canonical_json({"format_version": CANARY_VERSION, "tolerance": self.tolerance, **kind,
                               "canaries": [asdict(canary) for canary in self.canaries]}, first="format_version")

    @classmethod
    def from_bytes(cls, data: bytes) -> CanarySet:
        """Raises DamagedMemberError or NewerFormatError."""
        value = parse_json(CANARY, data)
        try:
            version = value["format_version"]
            if type(version) is int and version > CANARY_VERSION:
                raise NewerFormatError(f"{CANARY} has format {version}, this relaxpack reads up to {CANARY_VERSION}")
            canaries = tuple(_read(entry) for entry in value["canaries"])
            result = cls(float(value["tolerance"]), canaries, str(value.get("values", LOGITS)))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedMemberError(f"{CANARY} is damaged: {type(error).__name__}: {error}") from None
        if not canaries:
            raise DamagedMemberError(f"{CANARY} is damaged: it has no canaries")
        return result


def _read(entry: dict[str, Any]) -> Canary:
    canary = Canary(str(entry["name"]), _ids(entry["prompt_ids"]), _ids(entry["top_ids"]),
                    tuple(float(x) for x in entry["top_logits"]), _ids(entry["greedy_ids"]),
                    tuple(float(x) for x in entry["margins"]))
    if (not canary.prompt_ids or not canary.top_ids or len(canary.top_ids) != len(canary.top_logits)
            or len(canary.greedy_ids) != len(canary.margins)):
        raise ValueError(f"canary {canary.name!r} has lists of different lengths")
    return canary


def _ids(values: list[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("token ids must be natural numbers")
    return tuple(values)


@dataclass(frozen=True)
class Answer:
    """What the model answers now: all logits after the prompt, and its greedy continuation."""

    logits: Sequence[float] | np.ndarray
    greedy_ids: Sequence[int]


@dataclass(frozen=True)
class CanaryReport:
    """`max_difference`: of the expected top logits, infinite where a value is not finite. `diverged_at`: the first
    step whose greedy token differs, None where none does."""

    name: str
    ok: bool
    max_difference: float
    diverged_at: int | None
    message: str

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        if math.isinf(self.max_difference):
            value["max_difference"] = None
        return value


def compare(expected: Canary, actual: Answer, tolerance: float, values: str = LOGITS) -> CanaryReport:
    """Compare one canary with the answer of now. The logits must agree within `tolerance`; a greedy token may differ
    only where the two best were so close at build time that this tolerance explains it, and nothing after it is
    compared then."""
    vocabulary = len(actual.logits)
    if max(expected.top_ids) >= vocabulary:
        return CanaryReport(expected.name, False, math.inf, None, f"the model answers {vocabulary} {values}s, the canary "
                            f"knows that of {max(expected.top_ids)}")
    here = [float(actual.logits[token]) for token in expected.top_ids]
    if not all(math.isfinite(value) for value in here):
        return CanaryReport(expected.name, False, math.inf, None, f"the {values}s are not finite numbers")
    differences = [abs(a - b) for a, b in zip(here, expected.top_logits, strict=True)]
    worst = max(range(len(differences)), key=differences.__getitem__)
    difference = differences[worst]
    if not difference <= tolerance:
        return CanaryReport(expected.name, False, difference, None,
                            f"the {values} {'at' if values == HIDDEN else 'of token'} {expected.top_ids[worst]} is "
                            f"{here[worst]:.4f}, it was "
                            f"{expected.top_logits[worst]:.4f} at build (tolerance {tolerance:g})")
    if len(actual.greedy_ids) != len(expected.greedy_ids):
        return CanaryReport(expected.name, False, difference, None,
                            f"{len(actual.greedy_ids)} greedy tokens, expected {len(expected.greedy_ids)}")
    pairs = zip(actual.greedy_ids, expected.greedy_ids, strict=True)
    diverged = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    steps = len(expected.greedy_ids)
    close = f"{values}s within {difference:.2g} (tolerance {tolerance:g})"
    if not steps:
        return CanaryReport(expected.name, True, difference, None, close)
    if diverged is None:
        return CanaryReport(expected.name, True, difference, None, f"{close}, all {steps} greedy tokens equal")
    margin = expected.margins[diverged]
    # Two logits may each have moved by the tolerance.
    ok = margin <= 2 * tolerance
    return CanaryReport(expected.name, ok, difference, diverged,
                        f"{close}, greedy token {diverged} of {steps} is {actual.greedy_ids[diverged]} instead of "
                        f"{expected.greedy_ids[diverged]}, which led by {margin:.2g}"
                        + (": a tie within the tolerance" if ok else ""))
