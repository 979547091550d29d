"""Canary files and the comparison; recording and checking with a fake model."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from relaxpack.dist.canary import Answer, Canary, CanarySet, compare, foreign_tolerance, tolerance
from relaxpack.errors import CompileError, DamagedMemberError, NewerFormatError
from relaxpack.runtime.canaries import check, record
from relaxpack.runtime.step_plan import StepPlan

CANARY = Canary("c", (1, 2), (3, 0), (5.0, 4.0), (3, 1, 2), (1.0, 0.01, 2.0))
LOGITS = np.array([4.0, 0.0, 0.0, 5.0, -1.0])


def test_equal_answers() -> None:
    report = compare(CANARY, Answer(LOGITS, [3, 1, 2]), 1e-3)
    assert report.ok and report.max_difference == 0 and report.diverged_at is None
    assert "all 3 greedy tokens equal" in report.message


@pytest.mark.parametrize(("shift", "ok"), [(0.0009, True), (0.0011, False), (-0.0011, False), (math.nan, False),
                                           (math.inf, False)])
def test_logits_within_tolerance(shift: float, ok: bool) -> None:
    logits = LOGITS.copy()
    logits[0] += shift
    report = compare(CANARY, Answer(logits, [3, 1, 2]), 1e-3)
    assert report.ok is ok
    if math.isfinite(shift) and not ok:
        assert "token 0" in report.message and "4.0000" in report.message
    json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.parametrize(("greedy", "tolerance_", "ok", "at"), [
    ([3, 4, 4], 0.005, True, 1), ([3, 4, 2], 0.004, False, 1), ([0, 1, 2], 0.005, False, 0),
    ([3, 1], 0.005, False, None)])
def test_greedy_may_differ_only_at_a_tie(greedy: list[int], tolerance_: float, ok: bool, at: int | None) -> None:
    report = compare(CANARY, Answer(LOGITS, greedy), tolerance_)
    assert (report.ok, report.diverged_at) == (ok, at)


def test_another_vocabulary_fails() -> None:
    assert not compare(CANARY, Answer(LOGITS[:2], [3, 1, 2]), 1).ok


def test_file_round_trip() -> None:
    canaries = CanarySet(0.25, (CANARY, replace(CANARY, name="d")))
    assert CanarySet.from_bytes(canaries.to_bytes()) == canaries
    assert canaries.to_bytes().startswith(b'{\n  "format_version": 1')


@pytest.mark.parametrize("change", [{"canaries": []}, {"canaries": [{}]}, {"tolerance": "x"}, {"tolerance": None},
                                    {"canaries": [{**CANARY.__dict__, "top_ids": [1]}]},
                                    {"canaries": [{**CANARY.__dict__, "prompt_ids": [-1]}]}])
def test_damaged_files(change: dict[str, object]) -> None:
    data = json.dumps({**json.loads(CanarySet(0.25, (CANARY,)).to_bytes()), **change}).encode()
    with pytest.raises(DamagedMemberError, match="canary.json is damaged"):
        CanarySet.from_bytes(data)


def test_newer_file() -> None:
    with pytest.raises(NewerFormatError, match="format 2"):
        CanarySet.from_bytes(b'{"format_version": 2}')


def test_tolerance_is_that_of_the_coarsest_part() -> None:
    assert tolerance(["f32"]) < tolerance(["f32", "f16"]) < tolerance(["q4_1"])
    assert tolerance(["f32"], "bfloat16") == tolerance(["bf16"])
    assert tolerance(["f32"], kv_dtype="float8_e4m3fn") == tolerance(["q4_1"])
    assert foreign_tolerance(["bf16"], "bfloat16", "float8_e4m3fn") == foreign_tolerance(["q4_1"], "bfloat16")


class FakeRunner:
    """Logits are a fixed function of all tokens so far, which it keeps by page, as a real runner does."""

    page_size, num_pages, max_batch, prefill_chunk, max_context, vocab_size = 4, 20, 2, 3, 64, 11

    def __init__(self, offset: float = 0.0) -> None:
        self.slots: dict[int, int] = {}
        self.offset = offset
        self.buffer = np.empty((1, self.vocab_size), np.float32)   # reused, as device buffers are

    def forward(self, plan: StepPlan) -> np.ndarray:
        (step,) = plan.sequences
        assert len(step.token_ids) <= self.prefill_chunk and 0 not in step.page_ids
        for i, token in enumerate(step.token_ids, step.start):
            self.slots[step.page_ids[i // self.page_size] * self.page_size + i % self.page_size] = token
        if not step.logit_offsets:
            return np.empty((0, self.vocab_size), np.float32)
        length = step.start + len(step.token_ids)
        history = [self.slots[step.page_ids[i // self.page_size] * self.page_size + i % self.page_size]
                   for i in range(length)]
        state = sum((i + 1) * token for i, token in enumerate(history))
        self.buffer[0] = np.sin(np.arange(self.vocab_size) * (state + 1)) + self.offset
        return self.buffer


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7])
def test_record_then_check(length: int) -> None:
    prompt = [5, 3, 8, 1, 9, 2, 6][:length]
    canaries = record(FakeRunner(), {"p": prompt}, 1e-4, steps=5)
    (canary,) = canaries.canaries
    state = sum((i + 1) * token for i, token in enumerate(prompt))
    expected = np.sin(np.arange(11) * (state + 1)).astype(np.float32)
    assert canary.top_ids == tuple(np.argsort(-expected, kind="stable"))
    assert len(canary.greedy_ids) == len(canary.margins) == 5 and canary.greedy_ids[0] == expected.argmax()
    assert [report.ok for report in check(FakeRunner(), canaries)] == [True]
    (report,) = check(FakeRunner(offset=0.01), canaries)
    assert not report.ok and report.max_difference == pytest.approx(0.01, rel=0.01)


def test_a_model_that_overflows_is_not_shipped() -> None:
    with pytest.raises(CompileError, match="not finite"):
        record(FakeRunner(offset=math.inf), {"p": [1]}, 1e-3)
