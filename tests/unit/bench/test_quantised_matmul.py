"""What the benchmark of quantised matmuls concludes from its times, and the lists of what it builds; no GPU, no compiler."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import quantised_matmul
from benchmarks.gpu.quantised_matmul import chain_choices, verdicts
from benchmarks.gpu.quantised_variants import SETS, only, rule_variant, variant, without_duplicates


def timed(name: str, us: float, t: int = 16, weight: str | None = "fp8") -> dict[str, Any]:
    return {"linear": "8b.o", "name": name, "t": t, "weight": weight, "us": us}


def test_a_rule_stays_unless_another_is_more_than_2_percent_faster() -> None:
    result = {"rules": [["mixed", 16], ["mixed", 64]],
              "times": [timed("mixed", 12.0), timed("fewbulk", 8.0), timed("mixed", 12.0, 64), timed("fewbulk", 11.9, 64),
                        timed("cublas", 1.0, weight=None), timed("dequantize", 1.0, 0)]}
    first, second = verdicts(result)
    assert first == "8b.o t 16 fp8: rule 12.0 us (mixed), 1.50x by fewbulk"
    assert second == "8b.o t 64 fp8: rule 12.0 us (mixed), stays"


def test_no_verdict_where_the_rule_was_not_timed() -> None:
    assert verdicts({"rules": [["mixed", 16]], "times": [timed("fewbulk", 8.0)]}) == []


def test_a_kernel_that_several_want_is_built_once_and_remembers_whose_rule_it_is() -> None:
    one = variant("mixed", "8b.o", "fp8", (16,), columns=16)
    rule = {**variant("mixed", "8b.o", "fp8", (16, 64), columns=16), "rule": [64]}
    (found,) = without_duplicates([one], [rule])
    assert found["rows"] == [16, 64] and found["rule"] == [64] and one["rows"] == [16]


def test_the_rules_choice_is_the_one_that_a_build_takes() -> None:
    assert rule_variant("8b.gate_up", "fp8", 64)["family"] == "mixed"
    found = rule_variant("8b.o", "q4_0", 64)
    assert found["family"] == "fewbulk" and found["options"]["scaled"] and found["rows"] == [64]
    assert rule_variant("8b.down", "q4_0", 1)["family"] == "groups"


def test_a_chain_of_the_rules_stands_beside_one_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    index = SETS["rules"]()
    monkeypatch.setattr(quantised_matmul, "TIMES", {(v["name"], t): 1.0 for v in index for t in v["rows"]
                                                    if v["family"] == "mixed"})
    choices = dict(chain_choices(index, "fp8"))
    assert set(choices[16]) == {"rule", "before"}                       # gate_up's mixed kernel alone makes no chain
    assert [part for part, name in choices[16]["rule"].items() if name != choices[16]["before"][part]] == ["o", "down"]
    assert set(choices[1]) == {"rule"}                                  # nothing changed for one row in 8 bits
    one = dict(chain_choices(index, "q4_0"))[1]
    assert [part for part in one["rule"] if one["rule"][part] != one["before"][part]] == ["o"]
    assert set(dict(chain_choices(index, "q8_0"))[16]) == {"rule"}
    many = dict(chain_choices(index, "q8_0"))[32]
    assert [part for part in many["rule"] if many["rule"][part] != many["before"][part]] == ["qkv", "o"]


def test_a_part_of_a_set_has_what_unpacks_its_weights_and_the_norm_of_chains() -> None:
    found = only("8b.o q4_[01] (2|4)$", SETS["rules"]())
    assert {(v["linear"], t) for v in found for t in v["rows"]} >= {("8b.o", 0), ("8b.o", 2), ("8b.o", 4)}
    assert {(v["family"], v["weight"], *v["rule"]) for v in found if v["rule"]} == {
        ("rows", "q4_0", 2, 4), ("rows", "q4_1", 2, 4)}
    assert "norm4096" in {v["name"] for v in found}
    assert only("", SETS["rules"]()) == SETS["rules"]()
