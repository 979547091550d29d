"""The kernel variants that `kernels_matmul.py` builds and times. A variant is a plain dictionary, for the building machine
(TVM compiler) and the GPU machine (TVM runtime) alike; only `make` needs the compiler."""

from __future__ import annotations

from typing import Any

LINEARS: dict[str, tuple[int, int, bool]] = {       # name → N, K, swiglu
    "1b.qkv": (3072, 2048, False), "1b.o": (2048, 2048, False), "1b.gate_up": (16384, 2048, True),
    "1b.down": (2048, 8192, False), "1b.head": (128256, 2048, False),
    "8b.qkv": (6144, 4096, False), "8b.o": (4096, 4096, False), "8b.gate_up": (28672, 4096, True),
    "8b.down": (4096, 14336, False), "8b.head": (128256, 4096, False),
    "7b.qkv": (4608, 3584, False), "7b.o": (3584, 3584, False), "7b.gate_up": (37888, 3584, True),
    "7b.down": (3584, 18944, False),
}
MULTIPROCESSORS = 132


def variant(family: str, shape: tuple[int, int], dtype: str = "bfloat16", out_dtype: str | None = None,
            weight: str | None = None, rows: tuple[int, ...] = (), check: tuple[int, ...] = (), linear: str = "",
            **options: Any) -> dict[str, Any]:
    """rows: where to time it; check: where to compare it with float64 (t values)."""
    n, k = shape
    marks = "_".join(f"{key[:2]}{int(value)}" for key, value in options.items())
    name = "_".join(filter(None, [family, weight or "", f"{n}x{k}", dtype[:2], (out_dtype or dtype)[:2], marks]))
    return {"name": name, "family": family, "n": n, "k": k, "dtype": dtype, "out_dtype": out_dtype or dtype,
            "weight": weight, "rows": list(rows), "check": list(check), "linear": linear, "options": options}


def check_variants() -> list[dict[str, Any]]:
    """Odd shapes, epilogues and dtypes, few of each; only compared, not timed."""
    few = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 100, 128, 200)
    many = (1, 63, 64, 65, 127, 128, 129, 200, 257, 1000)
    found = []
    for swiglu, bias, residual in ((False, False, False), (False, True, True), (True, True, False), (True, False, True)):
        extra = {"bias": bias, "residual": residual, "swiglu": swiglu}
        found += [variant("rows", (1072, 584), check=few, columns=8, **extra),
                  variant("rows", (1072, 576), "float16", check=few, columns=16, strips=2, dependent_launch=True, **extra),
                  variant("few", (1072, 584), check=few, columns=8, consumers=1, split=1, **extra),
                  variant("few", (1072, 1088), "float16", check=few, columns=16, consumers=2, split=4, **extra),
                  variant("few", (1072, 1088), check=few, columns=64, consumers=2, split=2, blocks_per_sm=1, **extra),
                  variant("few", (1040, 1088), check=few, columns=128, consumers=2, split=2, share=2, blocks_per_sm=1,
                          dependent_launch=True, **extra),
                  variant("few", (1072, 2048), check=few, columns=64, consumers=2, split=3, share=2, **extra),
                  variant("few", (1072, 2048), "bfloat16", "float32", check=few, columns=256, consumers=2, split=6,
                          blocks_per_sm=1, **extra),
                  variant("few", (1072, 2048), check=few, columns=128, consumers=1, split=8, dependent_launch=True, **extra),
                  variant("many", (1072, 584), check=many, tile_n=256, **extra),
                  variant("many", (1072, 584), "float16", check=many, tile_n=192, cluster=2, dependent_launch=True, **extra),
                  variant("many", (1072, 584), "bfloat16", "float32", check=many, tile_n=128, cluster=2, **extra),
                  variant("few", (1072, 584), "bfloat16", "float32", check=few, columns=32, split=3, **extra),
                  variant("rows", (1072, 584), "bfloat16", "float32", check=few, columns=8, warps=4, **extra)]
    for weight in ("q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0", "fp8", "fp8_block"):
        instruction = {"convert": True} if weight.startswith("fp8") else {}     # of sm_89 and newer, for float16
        found += [variant("quant", (1072, 576), "bfloat16", "float32", weight, check=few[:9], columns=8),
                  variant("quant", (1072, 1088), "float16", None, weight, check=few[:9], columns=16, strips=2, bias=True,
                          swiglu=True, dependent_launch=True, **instruction),
                  variant("dequantize", (1072, 576), "bfloat16", None, weight, check=(0,))]
        found.append(variant("quant", (1072, 1088), "bfloat16", "float32", weight, check=few[:9], columns=8, warps=4,
                             ahead=True, residual=True, dependent_launch=True))
        if weight != "q6_k":
            more = (9, 16, 17, 33, 64, 65)
            found += [variant("few_quant", (1072, 576), "bfloat16", "float32", weight, check=more, columns=16),
                      variant("few_quant", (1072, 2048), "bfloat16", "float32", weight, check=more, columns=64, strips=2,
                              split=4, residual=True, dependent_launch=True),
                      variant("few_quant", (1072, 1088), "float16", None, weight, check=more, columns=32, strips=2, split=3,
                              bias=True, swiglu=True, **instruction)]
    return found


def few_options(n: int, k: int, columns: int) -> list[dict[str, int]]:
    """Tilings of gemm_few worth timing: enough blocks to fill the chip, not much more than one wave of them."""
    found = []
    for consumers, per_sm in ((1, 2), (2, 1), (2, 2)):
        if columns >= 128 and (consumers == 1 or per_sm == 2):
            continue
        slots = MULTIPROCESSORS * per_sm
        for share in (1, 2) if columns >= 64 and consumers == 2 else (1,):
            for split in (1, 2, 3, 4, 6, 8):
                blocks = -(-n // (64 * consumers * share)) * share * split
                if share * split > 8 or k // 64 // split < 4 or (split > 1 and blocks > 1.15 * slots):
                    continue
                if blocks < 0.55 * slots and share * split < 8:
                    continue
                found.append({"columns": columns, "consumers": consumers, "split": split, "share": share,
                              "blocks_per_sm": per_sm})
    return found


def few_variants() -> list[dict[str, Any]]:
    """1 to 256 rows in bf16 on the true shapes, every kernel launched dependently, as in a captured step."""
    found = []
    for linear, (n, k, swiglu) in LINEARS.items():
        shape, head = (n, k), linear.endswith("head")
        out = "float32" if head else None
        common: dict[str, Any] = {"linear": linear, "swiglu": swiglu, "dependent_launch": True}
        for warps, unroll in ((8, 2), (16, 2), (8, 4), (4, 4)):
            found.append(variant("rows", shape, out_dtype=out, rows=(1, 2, 4, 8), columns=8, warps=warps, unroll=unroll,
                                 **common))
        for columns, rows in ((8, (1, 8)), (16, (16,)), (32, (32,)), (64, (64,)), (128, (96, 128)), (256, (256,))):
            if not head or columns in (8, 64):
                options = few_options(n, k, columns)
                found += [variant("few", shape, out_dtype=out, rows=rows, **o, **common) for o in options]
    return found


def quant_variants() -> list[dict[str, Any]]:
    """1 to 64 rows with quantised weights."""
    found = []
    for linear, (n, k, swiglu) in LINEARS.items():
        if not linear.startswith("8b") and linear != "1b.gate_up":
            continue
        out = "float32" if linear.endswith("head") else None
        every = ("q4_0", "q4_1", "q4_k", "q6_k", "q8_0", "fp8", "fp8_block")
        for weight in every if linear in ("8b.o", "8b.gate_up") else ("q4_0",):
            common: dict[str, Any] = {"linear": linear, "swiglu": swiglu, "dependent_launch": True, "weight": weight}
            for warps, unroll, ahead in ((16, 2, True), (8, 2, True), (8, 2, False), (4, 4, False)):
                found.append(variant("quant", (n, k), out_dtype=out, rows=(1, 8), columns=8, warps=warps, unroll=unroll,
                                     ahead=ahead, **common))
            for columns in (16, 32, 64) if weight == "q4_0" else ():
                for strips in (1, 2):
                    blocks = -(-n // (128 * strips))
                    for split in (1, 2, 4, 8):
                        if 60 <= blocks * split <= 300 or (split == 1 and blocks > 300):
                            found.append(variant("few_quant", (n, k), out_dtype=out, rows=(columns,), columns=columns,
                                                 strips=strips, split=split, **common))
    for weight in ("q4_0", "q8_0", "fp8"):
        found.append(variant("dequantize", (28672, 4096), weight=weight, rows=(0,), linear="8b.gate_up"))
    return found


def fp8_variants() -> list[dict[str, Any]]:
    """fp8 weights alone: the checks of `check` and what `linear.py` picks for a few rows of the 8B."""
    from relaxpack.kernel_spec import LinearSpec
    from relaxpack.schedules.kernels.cuda.linear_rules import quantized_plan
    from relaxpack.weight_format import FORMATS

    found = {v["name"]: v for v in check_variants() if (v["weight"] or "").startswith("fp8")}
    for linear, (n, k, swiglu) in LINEARS.items():
        for weight in ("fp8", "fp8_block") if linear in ("8b.qkv", "8b.o", "8b.gate_up", "8b.down") else ():
            for rows in (1, 16, 64):
                spec = LinearSpec(n, k, FORMATS[weight], "decode", "bfloat16", "bfloat16", glu="swiglu" if swiglu else None,
                                  max_rows=rows)
                family, options = quantized_plan(spec, rows, hopper=True)
                if family not in (names := {"gemm_rows_quant": "quant", "gemm_few_quant": "few_quant"}):
                    continue        # quantised_matmul.py measures the others
                v = variant(names[family], (n, k), linear=linear, weight=weight, swiglu=swiglu, dependent_launch=True,
                            **options)
                found.setdefault(v["name"], v)["rows"].append(rows)
    return list(found.values())


def many_variants() -> list[dict[str, Any]]:
    """128 rows and more in bf16."""
    found = []
    for linear, (n, k, swiglu) in LINEARS.items():
        if linear.endswith("head") or linear.startswith("7b"):
            continue
        for tile_n in (128, 192, 256) if swiglu else (96, 128, 160, 192, 224, 256):
            for cluster in (1, 2):
                if tile_n in (96, 160) and cluster == 1:
                    continue
                found.append(variant("many", (n, k), rows=(128, 256, 512, 1024, 2048, 4096, 8192), linear=linear,
                                     swiglu=swiglu, tile_n=tile_n, cluster=cluster))
    return found


CHAIN_ROWS = (1, 16)


def chain_variants() -> list[dict[str, Any]]:
    """The matmuls and norms of one layer in order, as `linear.py` picks them for 1 and 16 rows, with and without dependent
    launch: what a decode step can reach without attention."""
    from relaxpack.schedules.kernels.cuda.linear_rules import hopper_plan

    found: dict[str, dict[str, Any]] = {}
    for model, h in (("1b", 2048), ("8b", 4096)):
        for pdl in (False, True):
            v = variant("norm", (1, h), rows=(1, 8, 128, 2048), check=(1, 3, 200), linear=f"{model}.norm", residual=True,
                        dependent_launch=pdl)
            found[v["name"]] = {**v, "chain": list(CHAIN_ROWS)}
            for part in ("qkv", "o", "gate_up", "down"):
                n, k, swiglu = LINEARS[f"{model}.{part}"]
                for rows in CHAIN_ROWS:
                    family, options = hopper_plan(n, k, rows, swiglu)
                    v = variant(family.removeprefix("gemm_"), (n, k), linear=f"{model}.{part}", swiglu=swiglu,
                                dependent_launch=pdl, **options)
                    found.setdefault(v["name"], {**v, "chain": []})["chain"].append(rows)
    others = [variant("norm", (1, h), "float16", check=(1, 3, 200), linear="norm", residual=residual, dependent_launch=True)
              for h in (576, 8448) for residual in (False, True)]
    return [*found.values(), *others]


PLAN_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192)


def plan_variants() -> list[dict[str, Any]]:
    """What `linear.py` picks for each bucket: the final table against cuBLAS. Needs no compiler to list."""
    from relaxpack.schedules.kernels.cuda.linear_rules import hopper_plan

    found: dict[str, dict[str, Any]] = {}
    for linear, (n, k, swiglu) in LINEARS.items():
        for rows in PLAN_ROWS:
            if linear.endswith("head") and rows > 128:
                continue
            family, options = hopper_plan(n, k, rows, swiglu)
            v = variant(family.removeprefix("gemm_"), (n, k), out_dtype="float32" if linear.endswith("head") else None,
                        rows=(rows,), linear=linear, swiglu=swiglu, dependent_launch=True, **options)
            found.setdefault(v["name"], {**v, "rows": []})["rows"].append(rows)
    return list(found.values())


def explore_variants() -> list[dict[str, Any]]:
    """Small matrices at 128 to 512 rows: which of several blocks of rows, splits and tiles wins."""
    found = []
    for linear, (n, k, swiglu) in LINEARS.items():
        if n > 6144:
            continue
        common: dict[str, Any] = {"linear": linear, "swiglu": swiglu, "dependent_launch": True}
        for columns, rows in ((64, (128, 256)), (128, (256, 512))):
            for split in (1, 2, 3, 4):
                if -(-n // 128) * split * (rows[0] // columns) <= 150:
                    found.append(variant("few", (n, k), rows=rows, columns=columns, consumers=2, split=split, share=1,
                                         blocks_per_sm=1, **common))
        for tile_n, cluster in ((64, 1), (64, 2), (96, 1), (96, 2), (128, 1), (192, 1)):
            found.append(variant("many", (n, k), rows=(128, 256, 512), tile_n=tile_n, cluster=cluster, **common))
    return found


def compare_variants() -> list[dict[str, Any]]:
    """gemm_many with and without dependent launch, two walking orders, in one run."""
    return [variant("many", (n, k), rows=(512, 1024, 2048, 4096), linear=linear, swiglu=swiglu, tile_n=tile_n,
                    group_m=group_m, dependent_launch=pdl)
            for linear, (n, k, swiglu) in LINEARS.items() if linear.startswith("8b") and not linear.endswith("head")
            for pdl in (False, True) for group_m in (8, 16) for tile_n in ((128, 256) if swiglu else (256,))]


def any_variants() -> list[dict[str, Any]]:
    """PrimFuncs in which the host picks by the number of rows."""
    rows = (1, 8, 9, 31, 32, 33, 64, 65, 128, 129, 256, 257, 511, 513, 1000, 1025, 2049, 3000)
    return [variant("any", (1072, 1088), dtype, check=rows, prefill=prefill, swiglu=swiglu, bias=bias, residual=residual)
            for dtype, prefill, swiglu, bias, residual in (
                ("bfloat16", True, False, True, False), ("float16", True, True, False, True),
                ("bfloat16", False, False, False, False), ("bfloat16", False, True, True, False))]


def group_variants() -> dict[str, list[dict[str, Any]]]:
    """Group name → variants without duplicates; a group is one library and one process on the GPU machine."""
    groups = {"check": check_variants(), "few": few_variants(), "quant": quant_variants(), "fp8": fp8_variants(),
              "chain": chain_variants(), "many": many_variants(), "plan": plan_variants(), "explore": explore_variants(),
              "compare": compare_variants(), "any": any_variants()}
    return {name: list({v["name"]: v for v in variants}.values()) for name, variants in groups.items()}


def make(variant: dict[str, Any]) -> Any:
    """Variant → PrimFunc named by it."""
    from relaxpack.schedules.kernels.cuda.dequantize import dequantize
    from relaxpack.schedules.kernels.cuda.gemm_few import gemm_few
    from relaxpack.schedules.kernels.cuda.gemm_few_bulk import gemm_few_bulk
    from relaxpack.schedules.kernels.cuda.gemm_few_quant import gemm_few_quant
    from relaxpack.schedules.kernels.cuda.gemm_group_columns import gemm_group_columns
    from relaxpack.schedules.kernels.cuda.gemm_many import gemm_many
    from relaxpack.schedules.kernels.cuda.gemm_mixed import gemm_mixed
    from relaxpack.schedules.kernels.cuda.gemm_rows import gemm_rows
    from relaxpack.schedules.kernels.cuda.gemm_rows_bulk import gemm_rows_bulk
    from relaxpack.schedules.kernels.cuda.gemm_rows_quant import gemm_rows_quant
    from relaxpack.schedules.kernels.cuda.norm import norm
    from relaxpack.weight_format import FORMATS

    from relaxpack.kernel_spec import LinearSpec, NormSpec  # isort: skip
    from relaxpack.schedules.kernels.cuda.linear import linear  # isort: skip

    n, k, dtype, out_dtype, options = (variant[key] for key in ("n", "k", "dtype", "out_dtype", "options"))
    if "swiglu" in options:
        options = {key: value for key, value in options.items() if key != "swiglu"}
        options["glu"] = "swiglu" if variant["options"]["swiglu"] else None
    family, name = variant["family"], variant["name"]
    if family == "dequantize":
        return dequantize(n, k, FORMATS[variant["weight"]], dtype, name=name)
    quantised = {"quant": gemm_rows_quant, "few_quant": gemm_few_quant, "rows_bulk": gemm_rows_bulk, "mixed": gemm_mixed,
                 "few_bulk": gemm_few_bulk, "group_columns": gemm_group_columns}
    if family in quantised:
        return quantised[family](n, k, FORMATS[variant["weight"]], dtype, out_dtype, name=name, **options)
    if family == "norm":
        return norm(NormSpec(k, 1e-5, dtype, options["residual"]), dependent_launch=options["dependent_launch"], name=name)
    if family == "any":
        flags = {key: options[key] for key in ("glu", "bias", "residual")}
        spec = LinearSpec(n, k, FORMATS["bf16" if dtype == "bfloat16" else "f16"],
                          "prefill" if options["prefill"] else "decode", dtype, out_dtype, **flags)
        (stage,) = linear(spec, "sm_90a").stages
        return stage.func.with_attr("global_symbol", name)
    return {"rows": gemm_rows, "few": gemm_few, "many": gemm_many}[family](n, k, dtype, out_dtype, name=name, **options)
