"""The kernel variants that `quantised_matmul.py` checks and times: data only, shared by the building machine (TVM compiler)
and the GPU machine. A variant is a plain dictionary; `SETS` names lists of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.matmul_variants import LINEARS
from relaxpack.weight_format import WHOLE_ROW

Options = dict[str, Any]

FAMILIES = {"gemm_few_bulk": "fewbulk", "gemm_mixed": "mixed", "gemm_rows_bulk": "bulk", "gemm_rows_quant": "rows",
            "gemm_group_columns": "groups"}       # of the rules → of variants


def variant(family: str, linear: str, weight: str | None, rows: tuple[int, ...], *, dtype: str = "bfloat16",
            out_dtype: str | None = None, shape: tuple[int, int] | None = None, check: tuple[int, ...] = (),
            **options: Any) -> dict[str, Any]:
    n, k, gated = (*shape, False) if shape else LINEARS[linear]
    if gated:
        options["glu"] = "swiglu"
    if linear.endswith("head"):
        out_dtype = "float32"
    marks = "_".join(f"{key[:3]}{value if isinstance(value, str) else int(value)}" for key, value in options.items())
    name = "_".join(filter(None, [family, weight or "", f"{n}x{k}", dtype[:2], (out_dtype or dtype)[:2], marks]))
    return {"name": name, "family": family, "linear": linear, "n": n, "k": k, "weight": weight, "dtype": dtype,
            "out_dtype": out_dtype or dtype, "rows": list(rows), "check": list(check), "options": options}


def check_variants() -> list[dict[str, Any]]:
    found = []
    few = (1, 3, 8, 9, 17, 33, 64, 65, 130, 200)
    for weight in ("q4_0", "q4_1", "q4_k", "q4_128", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0", "fp8", "fp8_block"):
        convert = {"convert": True} if weight.startswith("fp8") else {}
        pdl = {"dependent_launch": True}
        if weight in ("q4_0", "q4_1", "q4_k"):
            found += [variant("groups", "check", weight, (), shape=(1072, 1088), check=few[:5], out_dtype="float32", **pdl),
                      variant("groups", "check", weight, (), shape=(1072, 2048), check=few[:5], out_dtype="float32",
                              columns=2, dtype="float16", warps=4, unroll=2, ahead=True, bias=True, glu="swiglu",
                              residual=True, **pdl)]
        found += [
            variant("fewbulk", "check", weight, (), shape=(1072, 576), check=few, out_dtype="float32", columns=16),
            variant("fewbulk", "check", weight, (), shape=(1072, 2048), check=few, out_dtype="float32", columns=64, warps=3,
                    groups=2, split=3, residual=True, scaled=True, **pdl),
            variant("fewbulk", "check", weight, (), shape=(1072, 1088), check=few, dtype="float16", out_dtype="float32",
                    columns=32, warps=3, strips=1, groups=2, split=4, blocks_per_sm=2, bias=True, glu="swiglu", **pdl,
                    **convert),
            variant("fewbulk", "check", weight, (), shape=(1072, 2048), check=few, out_dtype="float32", columns=24, warps=7,
                    strips=2, groups=1, glu="swiglu", bias=True, residual=True, **pdl),
            variant("fewbulk", "check", weight, (), shape=(1072, 1088), check=few, out_dtype="float32", columns=16, warps=2,
                    strips=2, groups=3, split=2, residual=True, feeders=2, **pdl),
            variant("mixed", "check", weight, (), shape=(1072, 576), check=few, out_dtype="float32", columns=16),
            variant("mixed", "check", weight, (), shape=(1072, 2048), check=few, out_dtype="float32", columns=64, strips=2,
                    split=3, blocks_per_sm=1, residual=True, **pdl),
            variant("mixed", "check", weight, (), shape=(1072, 1088), check=few, dtype="float16", out_dtype="float32",
                    columns=32, split=4, bias=True, glu="swiglu", **pdl, **convert),
            variant("bulk", "check", weight, (), shape=(1072, 1088), check=few[:5], out_dtype="float32", **pdl),
            variant("bulk", "check", weight, (), shape=(1072, 2048), check=few[:5], out_dtype="float32", dtype="float16",
                    columns=16, warps=4, unroll=2, stages=3, bias=True, glu="swiglu", residual=True, **pdl, **convert)]
    found += [variant("fewbulk", "check", weight, (), shape=(1072, 1184), check=few, columns=64, warps=2, strips=1, groups=3,
                      scaled=True, feeders=3, **pdl) for weight in ("q4_0", "q4_1", "q6_k", "fp8_block")]
    found += [variant("mixed", "check", "q4_1", (), shape=(1072, 2048), check=few, out_dtype="float32", columns=128,
                      blocks_per_sm=1, consumers=2, glu="swiglu", bias=True, residual=True),
              variant("mixed", "check", "q4_0", (), shape=(1072, 2048), check=few, columns=256, blocks_per_sm=1),
              variant("mixed", "check", "q4_0", (), shape=(1072, 2048), check=few, out_dtype="float32", columns=64,
                      blocks_per_sm=1, consumers=4, split=2, dependent_launch=True),
              variant("mixed", "check", "q8_0", (), shape=(1072, 2048), check=few[:5], columns=8, consumers=1, split=8)]
    return found


# warps, strips, groups, split, blocks_per_sm of gemm_few_bulk, by matmul and rows of x (at most)
FEW_BULK = {
    ("8b.gate_up", 16): [(4, 2, 2, 1, 2), (4, 2, 1, 1, 2), (7, 2, 3, 1, 1)],
    ("8b.gate_up", 32): [(4, 2, 1, 1, 2)],
    ("8b.qkv", 16): [(3, 1, 5, 1, 1), (3, 1, 7, 1, 1), (1, 3, 7, 1, 1), (1, 3, 11, 1, 1)],
    ("8b.qkv", 32): [(3, 1, 5, 1, 1), (3, 1, 7, 1, 1)],
    ("8b.qkv", 64): [(3, 1, 5, 1, 1), (3, 1, 4, 1, 1)],
    ("8b.o", 16): [(2, 1, 7, 1, 1), (2, 1, 11, 1, 1), (2, 2, 5, 2, 1)],
    ("8b.o", 32): [(2, 2, 3, 2, 1), (2, 1, 7, 1, 1)],
    ("8b.o", 64): [(2, 1, 5, 1, 1), (2, 1, 6, 1, 1), (4, 1, 3, 2, 1), (2, 2, 3, 2, 1)],
    ("8b.down", 16): [(4, 2, 1, 4, 2), (2, 1, 11, 1, 1), (2, 1, 7, 1, 1), (2, 2, 7, 2, 1), (4, 1, 5, 2, 1), (4, 2, 2, 4, 2)],
    ("8b.down", 32): [(2, 2, 3, 2, 1), (2, 1, 7, 1, 1), (4, 1, 3, 2, 1)],
    ("8b.down", 64): [(2, 2, 3, 2, 1), (2, 1, 6, 1, 1), (4, 1, 3, 2, 1)]}


def few_bulk_variants(linear: str, weight: str, columns: int) -> list[dict[str, Any]]:
    shapes = FEW_BULK.get((linear, columns), [])
    return [variant("fewbulk", linear, weight, (columns,), columns=columns, warps=w, strips=r, groups=g, split=s,
                    blocks_per_sm=b, scaled=scaled, dependent_launch=True)
            for w, r, g, s, b in (shapes if weight == "q4_0" else shapes[:2] if columns == 16 else shapes[:3:2])
            for scaled in ((True, False) if columns == 64 and weight == "q4_0" else (columns == 64,))]


def group_variants(linear: str, weight: str) -> list[dict[str, Any]]:
    """1 to 4 rows: eight rows as columns of the product against fewer rows times groups."""
    from relaxpack.schedules.kernels.cuda.linear_rules import rows_tiling
    from relaxpack.schedules.kernels.cuda.quantized_tilings import group_columns_tiling
    from relaxpack.weight_format import FORMATS

    n, k, _ = LINEARS[linear]
    groups = [variant("groups", linear, weight, (rows,), dependent_launch=True, **group_columns_tiling(n, k, rows))
              for rows in (1, 2, 4)]
    return [variant("rows", linear, weight, (1, 2, 4), dependent_launch=True, columns=8,
                    **rows_tiling(n, k, FORMATS[weight])), *groups]


def unpacked(linear: str, weight: str) -> list[dict[str, Any]]:
    """What unpacks a weight: results of the kernels that are listed behind it are compared with its product."""
    return [variant("dequantize", linear, weight, (0,), dtype=dtype) for dtype in ("bfloat16", "float16")]


def timed_variants() -> list[dict[str, Any]]:
    from relaxpack.schedules.kernels.cuda.quantized_tilings import mixed_tiling
    from relaxpack.weight_format import FORMATS

    found = []
    for linear in ("8b.gate_up", "8b.o", "8b.down", "8b.qkv"):
        n, k, _ = LINEARS[linear]
        for weight in ("q4_0", "q4_1", "q4_128", "q8_0", "fp8"):
            found += unpacked(linear, weight)
            if weight in ("q4_0", "q4_1"):
                found += group_variants(linear, weight)
            for columns in (16, 32, 64) if weight == "q4_0" else (16, 64):
                found += few_bulk_variants(linear, weight, columns)
                found.append(variant("mixed", linear, weight, (columns,), dependent_launch=True,
                                     **mixed_tiling(n, k, columns, FORMATS[weight])))
        found += [variant("bulk", linear, "q4_0", (16,), columns=16, warps=w, unroll=u, stages=s, blocks_per_sm=b,
                          dependent_launch=True) for w, u, s, b in ((8, 2, 4, 2), (16, 2, 2, 1)) if n <= 8192]
    return found


def rule_variant(linear: str, weight: str, rows: int, **changes: Any) -> dict[str, Any]:
    """What the rule takes for so many rows, with `changes` to its options."""
    from relaxpack.kernel_spec import LinearSpec
    from relaxpack.schedules.kernels.cuda.linear_rules import quantized_plan
    from relaxpack.weight_format import FORMATS

    n, k, gated = LINEARS[linear]
    spec = LinearSpec(n, k, FORMATS[weight], "decode", "bfloat16", "bfloat16", glu="swiglu" if gated else None,
                      max_rows=rows)
    family, options = quantized_plan(spec, rows, True)
    return variant(FAMILIES[family], linear, weight, (rows,), dependent_launch=True, **options, **changes)


def rule_set() -> list[dict[str, Any]]:
    """What the rules take of five formats at every row count of a bucket, what they took `before`, for chains of layers, and
    what docs/kernels_cuda.md asks about beside them."""
    found = []
    for linear in ("8b.o", "8b.down", "8b.qkv", "8b.gate_up"):
        for weight in ("q4_0", "q4_1", "q8_0", "fp8", "fp8_block"):
            found += unpacked(linear, weight)
            for rows in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192):
                rule = {**rule_variant(linear, weight, rows), "rule": [rows]}
                found += [rule, *({**one, "before": [rows]} for one in before(rule, rows)),
                          *(changed(rule, rows, **one) for one in OTHERS.get((linear, rows), []))]
    return found


# Options of gemm_few_bulk beside the rule's, by matmul and rows of x.
OTHERS: dict[tuple[str, int], list[dict[str, Any]]] = {("8b.down", rows): [{"feeders": 2}] for rows in (16, 32)}
# What the rules took until the run of `2026-11-30-h200-quantised-3.json`, where they take something else since.
BEFORE: dict[tuple[str, int], Options] = {
    ("8b.o", 1): {"ahead": 2, "blocks_per_sm": 3}, ("8b.o", 32): {"feeders": 1}, ("8b.qkv", 32): {"groups": 5, "feeders": 1}}
BEFORE_ONE_SCALE: dict[tuple[str, int], Options] = {        # a row of the weight
    ("8b.o", 16): {"groups": 7}, ("8b.qkv", 32): {"groups": 5, "feeders": 1},
    **{("8b.down", rows): {"warps": 2, "groups": 7, "split": 1} for rows in (16, 32)}}


# warps, strips, groups, split, blocks_per_sm of gemm_few_bulk for weights with minimums: 9 to 32 rows.
MINIMUMS = {
    "8b.gate_up": [(4, 2, 2, 1, 2), (4, 2, 1, 1, 2), (7, 2, 2, 1, 1), (7, 2, 3, 1, 1), (7, 2, 1, 1, 1), (4, 2, 3, 1, 2)],
    "8b.qkv": [(3, 1, 3, 1, 1), (3, 1, 4, 1, 1), (3, 1, 5, 1, 1), (3, 1, 7, 1, 1), (1, 3, 7, 1, 1), (1, 3, 9, 1, 1),
               (1, 3, 11, 1, 1), (1, 3, 13, 1, 1)],
    "8b.o": [(2, 1, 5, 1, 1), (2, 1, 6, 1, 1), (2, 1, 7, 1, 1), (2, 1, 9, 1, 1), (2, 1, 11, 1, 1), (2, 2, 3, 2, 1),
             (2, 2, 5, 2, 1), (2, 2, 6, 2, 1), (4, 1, 3, 2, 1), (1, 2, 11, 1, 1), (1, 2, 13, 1, 1)],
    "8b.down": [(4, 1, 3, 2, 1), (4, 1, 4, 2, 1), (4, 1, 5, 2, 1), (2, 2, 5, 2, 1), (2, 2, 6, 2, 1), (2, 2, 7, 2, 1),
                (2, 1, 7, 1, 1), (2, 1, 11, 1, 1), (1, 2, 13, 1, 1)]}


def minimum_set() -> list[dict[str, Any]]:
    """q4_1 at 16 and 32 rows: minimums added apart, and in the weights (`scaled`), at many tilings."""
    found = []
    for linear, tilings in MINIMUMS.items():
        found += unpacked(linear, "q4_1")
        for rows, (w, r, g, s, b), scaled in itertools.product((16, 32), tilings, (False, True)):
            found += [variant("fewbulk", linear, "q4_1", (rows,), columns=rows, warps=w, strips=r, groups=g, split=s,
                              blocks_per_sm=b, scaled=scaled, feeders=feeders, dependent_launch=True)
                      for feeders in ((1,) if b == 2 else (1, 2, 3)) if w * g + feeders <= 25]
    return found


def changed(one: dict[str, Any], rows: int, **changes: Any) -> dict[str, Any]:
    options = {key: value for key, value in {**one["options"], **changes}.items() if key != "glu"}
    return variant(one["family"], one["linear"], one["weight"], (rows,), **options)


def before(rule: dict[str, Any], rows: int) -> list[dict[str, Any]]:
    """What the rule took before its last change, of kernels that it still takes: BEFORE."""
    from relaxpack.weight_format import FORMATS

    table = BEFORE_ONE_SCALE if FORMATS[rule["weight"]].group_size == WHOLE_ROW else BEFORE
    options = table.get((rule["linear"], rows), {})
    return [changed(rule, rows, **options)] if options and options.keys() <= rule["options"].keys() else []


def only(pattern: str, variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The variants and row counts whose "MATMUL FORMAT ROWS" has the regular expression, and what every run needs."""
    found = []
    for one in variants:
        kept = {key: [t for t in one[key] if t == 0 or re.search(pattern, f"{one['linear']} {one['weight']} {t}")]
                for key in ("rows", "rule", "before")}
        if kept["rows"] or not one["rows"]:
            found.append({**one, **kept})
    return found


def without_duplicates(*lists: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A kernel that is wanted for several row counts is built once."""
    found: dict[str, dict[str, Any]] = {}
    for entry in [one for variants in lists for one in variants]:
        known = found.setdefault(entry["name"], {**entry, "rows": [], "rule": [], "before": []})
        for key in ("rows", "rule", "before"):
            known[key] += [t for t in entry.get(key, []) if t not in known[key]]
    return list(found.values())


NORM: dict[str, Any] = {        # of chains
    "name": "norm4096", "family": "norm", "linear": "8b.norm", "n": 1, "k": 4096, "weight": None, "dtype": "bfloat16",
    "out_dtype": "bfloat16", "rows": [], "check": [], "options": {}}
SETS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "all": lambda: without_duplicates(check_variants(), timed_variants(), [NORM]),
    "rules": lambda: without_duplicates(rule_set(), [NORM]),
    "minimums": lambda: without_duplicates(minimum_set(), [NORM])}
