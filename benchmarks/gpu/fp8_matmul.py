"""Matmuls of e4m3 activations and weights against torch._scaled_mm (a scale per row of either) and ours in bf16, in turns.

    python -m benchmarks.gpu.fp8_matmul build FOLDER                  # anywhere with nvcc, no GPU needed
    python benchmarks/gpu/fp8_matmul.py run FOLDER --out OUT.json --limit 90      # on the GPU: TVM's runtime and torch

As matmul_turns.py: an item is one matmul of one model at one number of rows; kernels are compared with float64 of the same
codes (poisoned output, an odd number of rows, two runs bit for bit) before they are timed. `quantise+` is the product with
the kernel that makes the codes of x before it. `precision` says how far the sums of the tensor cores are from exact ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.kernel_libraries import compile_parts, spilling
from benchmarks.gpu.matmul_bench import Bench, copies_to_rotate, exact
from benchmarks.gpu.matmul_turns import Turns, child, in_turn, medians, run
from benchmarks.gpu.matmul_variants import LINEARS, make, variant

FEW_ROWS = (16, 64)             # where kernels that read packed fp8 weights and float activations compete
ROWS = (128, 192, 256, 512, 1024, 2048, 4096, 8192)
MODELS = ("8b", "1b")
CHECK_ROWS = 200
PRECISION = ((4096, 4096), (4096, 14336))           # N, K
LARGEST = 448.0


# ---- building machine ----

def candidates(linear: str, rows: int, extra: str) -> Iterator[dict[str, Any]]:
    """What the rule takes, the same without promotion, and the tile whose estimate comes next."""
    from relaxpack.schedules.kernels.cuda.linear_rules import TILE_WIDTHS, e4m3_estimate, e4m3_tiling

    n, k, swiglu = LINEARS[linear]
    gated = swiglu and bool(extra)
    flag = {} if not extra else {"swiglu": True} if swiglu else {"residual": True}
    rule = e4m3_tiling(n, k, rows, gated)
    yield {**rule, **flag}
    yield {**rule, **flag, "promote": 0}
    others = sorted((e4m3_estimate(n, k, min(rows, 4096), width, 1), width) for width in TILE_WIDTHS
                    if (width <= 192 or width == 256) and width % (32 if gated else 16) == 0 and width != rule["tile_n"])
    if not extra:
        width = others[0][1]
        yield {"tile_n": width, "promote": 2 if width <= 128 else 1, **({"whole_store": True} if width > 128 else {})}


def packed_variant(linear: str, rows: int) -> dict[str, Any]:
    """What reads the same weights with float activations."""
    from relaxpack.kernel_spec import LinearSpec
    from relaxpack.schedules.kernels.cuda.linear_rules import quantized_plan
    from relaxpack.weight_format import FORMATS

    n, k, _ = LINEARS[linear]
    family, options = quantized_plan(LinearSpec(n, k, FORMATS["fp8"], "decode", "bfloat16", "bfloat16", max_rows=rows), rows,
                                     hopper=True)
    return variant(family.removeprefix("gemm_"), (n, k), weight="fp8", linear=linear, dependent_launch=True, **options)


def items() -> list[dict[str, Any]]:
    """One matmul's items together: its weights are made once. Of our bf16 kernels the rule's."""
    from relaxpack.schedules.kernels.cuda.linear_rules import hopper_plan

    found = []
    for linear in (name for model in MODELS for name in LINEARS if name.startswith(model) and not name.endswith("head")):
        n, k, swiglu = LINEARS[linear]
        for rows in (*FEW_ROWS, *ROWS) if linear.startswith("8b") else ROWS:
            for extra in ("", "epilogue"):
                if extra and (rows not in (512, 2048, 4096) or linear.endswith("qkv")):
                    continue
                family, options = hopper_plan(n, k, rows, swiglu and bool(extra))
                flag = {} if not extra else {"swiglu": True} if swiglu else {"residual": True}
                made = [variant(family.removeprefix("gemm_"), (n, k), linear=linear, dependent_launch=True, **options,
                                **flag)]
                made += [packed_variant(linear, rows)] if rows in FEW_ROWS else []
                made += [variant("many", (n, k), weight="fp8", linear=linear, dependent_launch=True, e4m3=True, **one)
                         for one in candidates(linear, rows, extra)]
                found.append({"linear": linear, "rows": rows, "extra": extra,
                              "variants": list({one["name"]: one for one in made}.values())})
    return found


def precision_variants() -> list[dict[str, Any]]:
    """float32 results, so that nothing but the sums is rounded."""
    return [variant("many", shape, out_dtype="float32", weight="fp8", e4m3=True, tile_n=128, promote=promote)
            for shape in PRECISION for promote in (0, 1, 2, 4, 8)]


def check_variants() -> list[dict[str, Any]]:
    """Odd shapes, epilogues and row counts around the edges of tiles; only compared, not timed."""
    rows, found = (1, 17, 63, 64, 65, 127, 128, 129, 200, 257, 1000), []
    for swiglu, bias, residual in ((False, False, False), (False, True, True), (True, True, False), (True, False, True)):
        extra = {"bias": bias, "residual": residual, "swiglu": swiglu}
        found += [variant("many", (1072, 584), weight="fp8", check=rows, e4m3=True, tile_n=256, promote=1, **extra),
                  variant("many", (1072, 584), "float16", weight="fp8", check=rows, e4m3=True, tile_n=96, promote=2,
                          dependent_launch=True, **extra),
                  variant("many", (1072, 2056), weight="fp8", check=rows, e4m3=True, tile_n=64, split=2, promote=1,
                          dependent_launch=True, **extra),
                  variant("many", (1072, 2056), out_dtype="float32", weight="fp8", check=rows, e4m3=True, tile_n=128,
                          promote=1, **extra)]
    return found


def build_checks(folder: Path) -> None:
    from relaxpack.schedules.kernels.cuda.quantize_rows import quantize_rows

    variants = check_variants()
    makers: dict[str, Callable[[], Any]] = {one["name"]: partial(make, one) for one in variants}
    for k, dtype in sorted({(one["k"], one["dtype"]) for one in variants}):
        name = f"quantize_rows_{k}_{dtype}"
        makers[name] = partial(quantize_rows, k, dtype, name=name)
    made = compile_parts(folder, "fp8_check", makers)
    (folder / "checks.json").write_text(json.dumps({
        "variants": variants, "place": {name: kernel["library"] for name, kernel in made.items()}}))


def build(folder: Path, per_module: int = 16) -> None:
    from relaxpack.schedules.kernels.cuda.quantize_rows import quantize_rows

    todo, precise = items(), precision_variants()
    makers: dict[str, Callable[[], Any]] = {one["name"]: partial(make, one) for item in todo for one in item["variants"]}
    makers |= {one["name"]: partial(make, one) for one in precise}
    for k in sorted({LINEARS[item["linear"]][1] for item in todo}):
        name = f"quantize_rows_{k}"
        makers[name] = partial(quantize_rows, k, "bfloat16", dependent_launch=True, name=name)
    made = compile_parts(folder, "fp8", makers, per_module)
    place = {name: kernel["library"] for name, kernel in made.items()}
    (folder / "turns.json").write_text(json.dumps({"items": todo, "place": place, "precision": precise}))
    print(f"{len(made)} kernels for {len(todo)} items; with a stack frame: {spilling(made)}")


# ---- GPU machine ----

def in_kernel_order(torch: Any, codes: Any) -> Any:
    """x `[t, K]` → `[t, K padded to 64]` in the order of K that packed weights have."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 64))
    chunks = codes.reshape(codes.shape[0], -1, 2, 4, 2, 4)[..., [0, 2, 1, 3]]      # chunk, half, q, word, value
    return chunks.permute(0, 1, 3, 2, 4, 5).reshape(codes.shape).contiguous()


def quantized(torch: Any, x: Any) -> tuple[Any, Any]:
    """Rows of x as quantize_rows.py defines them: float8 codes and scales `[t]`."""
    largest = x.float().abs().amax(1).clamp(min=2.0 ** -110)
    most = torch.full_like(largest, LARGEST)    # of tensors the quotient is rounded; a number's reciprocal would be too
    codes = (x.float() * (most / largest)[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes, largest / most


def packed(torch: Any, codes: Any) -> Any:
    """Weights `[N, K]` as packing.py packs them, int32; N is a multiple of 16."""
    n, k = codes.shape
    pieces = in_kernel_order(torch, codes).reshape(n // 16, 2, 8, k // 64, 4, 16).permute(0, 3, 1, 2, 4, 5)
    places = torch.arange(4)[None] ^ torch.arange(8)[:, None] // 2 % 4
    swizzled = torch.stack([pieces[..., g, places[g].tolist(), :] for g in range(8)], dim=3)
    return swizzled.contiguous().view(torch.int32).reshape(-1)


def packed_scales(scales: Any) -> Any:
    """`[N]` → strip, g, row."""
    return scales.reshape(-1, 2, 8).permute(0, 2, 1).reshape(-1).contiguous()


class Fp8Turns(Turns):
    """`Turns` with e4m3 operands beside those of bf16."""

    def __init__(self, folder: Path, place: dict[str, str]) -> None:
        super().__init__(folder, place)
        self.codes: dict[str, Any] = {}
        self.checks: dict[str, Any] = {}
        self.place_of_precision = json.loads((folder / "turns.json").read_text())["precision"]
        self.ceiling = self.fp8_ceiling()
        self.precise = self.precision()

    def weights_of(self, linear: str) -> dict[str, Any]:
        if linear not in self.codes:
            self.codes.clear()
            self.checks.clear()
            bf16 = self.copies(linear)
            codes, scales = quantized(self.torch, bf16[0])
            count = max(4, copies_to_rotate(codes.numel()))
            first = packed(self.torch, codes.view(self.torch.uint8))
            self.codes[linear] = {
                "plain": [codes, *(codes.clone() for _ in range(count - 1))], "scales": scales,
                "packed": [first, *(first.clone() for _ in range(count - 1))], "packed_scales": packed_scales(scales)}
        return self.codes[linear]

    def call(self, one: dict[str, Any], x: tuple[Any, Any], weight: Any, scales: Any, extra: list[Any], out: Any) -> Any:
        """x: uint8 codes in the kernels' order, scales."""
        return partial(self.kernel(one), *x, weight.view(self.torch.uint32), scales, *extra, out)

    def fp8_ceiling(self) -> float:
        torch, size = self.torch, 8192
        a, b = (self.bench.random((size, size), "bfloat16").to(torch.float8_e4m3fn) for _ in range(2))
        ones = torch.ones((), device="cuda")
        us = self.bench.time([partial(torch._scaled_mm, a, b.T, ones, ones, out_dtype=torch.bfloat16, use_fast_accum=True)])
        return 2 * size**3 / us / 1e6

    def precision(self) -> list[dict[str, Any]]:
        """Relative error of the sums alone against float64, for numbers of both signs and of one."""
        torch, found = self.torch, []
        for one in self.place_of_precision:
            n, k = one["n"], one["k"]
            for kind in ("both signs", "positive"):
                x, w = (self.bench.random((rows, k), "float32") for rows in (CHECK_ROWS, n))
                if kind == "positive":
                    x, w = x.abs(), w.abs()
                (xc, xs), (wc, ws) = quantized(self.torch, x), quantized(self.torch, w)
                out = torch.full((CHECK_ROWS, n), float("nan"), device="cuda")
                self.call(one, (in_kernel_order(torch, xc.view(torch.uint8)), xs), packed(torch, wc.view(torch.uint8)),
                          packed_scales(ws), [], out)()
                exact = (xc.double() @ wc.double().T) * xs.double()[:, None] * ws.double()[None]
                found.append({"k": k, "promote": one["options"]["promote"], "kind": kind, "error": self.error(out, exact),
                              "largest": float(((out - exact).abs() / exact.norm(dim=1, keepdim=True) * n**0.5).max()),
                              "bias": float(((out - exact) / exact).mean()) if kind == "positive" else 0.0})
                for fast in (True, False):
                    if one["options"]["promote"] == 0:
                        some, one_scale = xc[:CHECK_ROWS // 16 * 16], torch.ones((), device="cuda")
                        theirs = torch._scaled_mm(some, wc.T, one_scale, one_scale, out_dtype=torch.float32,
                                                  use_fast_accum=fast)
                        plain = some.double() @ wc.double().T
                        found.append({"k": k, "promote": f"torch, fast {fast}", "kind": kind,
                                      "error": self.error(theirs, plain)})
        return found

    def check8(self, one: dict[str, Any], weights: dict[str, Any], quantize: str) -> list[float]:
        """[the largest relative error of a row against float64 of the codes, at an odd number of rows (infinite where two
        runs differ), share of codes that differ from the definition]."""
        torch = self.torch
        if not self.checks:
            x = self.bench.random((CHECK_ROWS, one["k"]), "bfloat16")
            x[3] = 0
            x[5] *= 1e-4
            x[7, ::3] *= 1e4
            codes, scales = quantized(self.torch, x)
            made = [torch.full(codes.shape, 0xAA, device="cuda", dtype=torch.uint8), torch.full_like(scales, float("nan"))]
            self.bench.kernel({"name": quantize, "library": self.place[quantize]})(x, *made)
            differ = float((made[0] != in_kernel_order(torch, codes.view(torch.uint8))).double().mean())
            if not torch.allclose(made[1], scales, rtol=1e-6, atol=0):
                differ = 1.0
            product = codes.double() @ weights["plain"][0].double().T
            product = product * scales.double()[:, None] * weights["scales"].double()
            self.checks = {"x": (in_kernel_order(torch, codes.view(torch.uint8)), scales), "product": product,
                           "differ": differ}
        extra = self.extras(one, CHECK_ROWS)
        reference = self.finish(one, self.checks["product"], extra)
        outs = [torch.full(reference.shape, float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        for out in outs:
            self.call(one, self.checks["x"], weights["packed"][0], weights["packed_scales"], extra, out)()
        apart = (outs[0].double() - reference).norm(dim=1) / reference.norm(dim=1).clamp(min=1e-30)
        return [float(apart.max()) if torch.equal(*outs) else float("inf"), self.checks["differ"]]

    def scaled_mm(self, item: dict[str, Any], x: tuple[Any, Any], weights: dict[str, Any],
                  used: int) -> dict[str, list[Any]]:
        """torch's products, and behind them what the epilogue needs: a kernel of its own."""
        from benchmarks.gpu.matmul_turns import silu_and_multiply

        torch, linear = self.torch, item["linear"]
        codes, scales = x
        y = torch.empty((codes.shape[0], LINEARS[linear][0]), device="cuda", dtype=torch.bfloat16)
        behind: list[Callable[[], Any]] = []
        if item["extra"] and LINEARS[linear][2]:
            out = torch.empty((y.shape[0], y.shape[1] // 2), device="cuda", dtype=y.dtype)
            behind = [partial(silu_and_multiply(), y, out)]
        elif item["extra"]:
            behind = [partial(y.add_, torch.randn_like(y))]
        found = {}
        for fast in (True, False):
            products = [partial(torch._scaled_mm, codes, weight.T, scales[:, None], weights["scales"][None],
                                out_dtype=torch.bfloat16, use_fast_accum=fast)
                        for weight in weights["plain"][:used]]
            found[f"scaled_mm{' fast' * fast}"] = [partial(in_turn, product, *behind) for product in products]
        return found

    def measure(self, item: dict[str, Any], skip: set[str], at: Callable[[str], None]) -> dict[str, Any]:
        torch, rows, linear = self.torch, item["rows"], item["linear"]
        bf16, weights = self.copies(linear), self.weights_of(linear)
        n, k, _ = LINEARS[linear]
        quantize = f"quantize_rows_{k}"
        most = 8 if rows <= 512 else 4 if rows <= 2048 else 2
        used16, used = (min(len(copies), 40 if rows <= 512 else most) for copies in (bf16, weights["plain"]))
        x = self.bench.random((rows, k), "bfloat16")
        codes, scales = quantized(self.torch, x)
        ordered = in_kernel_order(torch, codes.view(torch.uint8))
        replays: dict[str, Callable[[], float]] = {}
        errors: dict[str, list[float]] = {}
        for one in item["variants"]:
            name = one["name"]
            if name in skip:
                continue
            at(name)
            extra = self.extras(one, rows)
            out = torch.full((rows, n // (2 if one["options"].get("swiglu") else 1)), float("nan"), device="cuda",
                             dtype=x.dtype)
            if one["weight"] is None:
                replays["bf16"] = self.bench.captured([
                    partial(self.kernel(one), x, weight, *extra, out) for weight in bf16[:used16]])
                continue
            if not one["options"].get("e4m3"):
                replays["packed"] = self.bench.captured([
                    partial(self.kernel(one), x, weight.view(torch.uint32), weights["packed_scales"], out)
                    for weight in weights["packed"][:used]])
                continue
            if name not in self.checked:
                self.checked[name] = self.check8(one, weights, quantize)
            errors[name] = self.checked[name]
            limit = 4e-3 if one["options"].get("promote") else 1e-2             # the tensor cores' sums have 14 bits
            if not (errors[name][0] < limit and errors[name][1] < 1e-3):        # a wrong kernel is not timed
                continue
            calls = [self.call(one, (ordered, scales), weight, weights["packed_scales"], extra, out)
                     for weight in weights["packed"][:used]]
            replays[name] = self.bench.captured(calls)
            if "quantise+" not in replays:
                made = torch.empty_like(ordered), torch.empty_like(scales)
                first = partial(self.bench.kernel({"name": quantize, "library": self.place[quantize]}), x, *made)
                replays["quantise+"] = self.bench.captured([
                    partial(in_turn, first, self.call(one, made, weight, weights["packed_scales"], extra, out))
                    for weight in weights["packed"][:used]])
        at("scaled_mm")
        for name, calls in self.scaled_mm(item, (codes, scales), weights, used).items():
            replays[name] = self.bench.captured(calls)
        return {"linear": linear, "rows": rows, "extra": item["extra"], "errors": errors, "ceiling": self.ceiling,
                "precision": self.precise, "us": medians(replays, rows)}


class Fp8Checks:
    """Rows of very different size through quantize_rows and the product, against float64 of the codes that were made."""

    def __init__(self, folder: Path) -> None:
        found = json.loads((folder / "checks.json").read_text())
        self.bench, self.place, self.variants = Bench(folder), found["place"], found["variants"]

    def kernel(self, name: str) -> Any:
        return self.bench.kernel({"name": name, "library": self.place[name]})

    def check(self, one: dict[str, Any]) -> list[dict[str, Any]]:
        """By number of rows: the largest relative error of a row, whether a second run has the same bits, and the share of
        codes that are not those of the definition."""
        torch, n, k, options = self.bench.torch, one["n"], one["k"], one["options"]
        ((codes, scales),), weight = self.bench.packed(one, 1)
        plain = torch.from_numpy(weight.dequantize()).cuda()
        bias = self.bench.random((n,), "float32") if options["bias"] else None
        natural = in_kernel_order(torch, torch.arange(k, device="cuda")[None] + 1)[0] - 1       # -1: padding
        found = []
        for t in one["check"]:
            x = self.bench.random((t, k), one["dtype"]) * (10.0 ** (torch.arange(t, device="cuda") % 6 - 5))[:, None]
            x = x.to(getattr(torch, one["dtype"]))
            x[::7, ::5] *= 30
            x[::11] = 0
            made, of_rows = torch.empty((t, len(natural)), device="cuda", dtype=torch.uint8), torch.empty(t, device="cuda")
            self.kernel(f"quantize_rows_{k}_{one['dtype']}")(x, made, of_rows)
            wanted, expected = quantized(torch, x)
            differ = float((made != in_kernel_order(torch, wanted.view(torch.uint8))).double().mean())
            rounded = torch.zeros((t, k), device="cuda", dtype=torch.uint8)
            rounded[:, natural[natural >= 0]] = made[:, natural >= 0]
            values = rounded.view(torch.float8_e4m3fn).double() * of_rows.double()[:, None]
            width = n // 2 if options["swiglu"] else n
            residual = self.bench.random((t, width), one["dtype"]) if options["residual"] else None
            y, again = (torch.full((t, width), float("nan"), device="cuda", dtype=getattr(torch, one["out_dtype"]))
                        for _ in range(2))
            for out in (y, again):
                self.kernel(one["name"])(made, of_rows, codes.view(torch.uint32), scales, *(() if bias is None else (bias,)),
                                         *(() if residual is None else (residual,)), out)
            z = exact(values, plain, bias, residual, options["swiglu"], in_order=False)
            error = float(((y.double() - z).norm(dim=1) / z.norm(dim=1).clamp(min=1e-30)).max())
            limit = {"bfloat16": 4e-3, "float16": 2e-3, "float32": 1e-3}[one["out_dtype"]]
            found.append({"name": one["name"], "t": t, "error": error, "differ": differ, "same_again": torch.equal(y, again),
                          "ok": error < limit and differ < 1e-3 and torch.allclose(of_rows, expected, rtol=1e-6, atol=0)})
        return found


def report(result: dict[str, Any]) -> None:
    print("ceilings", result.get("ceilings"), "complete", result.get("complete"), "broken", result["broken"], "failures",
          result["failures"][:3])
    for line in next((item["precision"] for item in result["items"]), []):
        print(line)
    if not result["items"]:
        return
    bad = [(name, *value) for item in result["items"] for name, value in item["errors"].items() if name not in item["us"]]
    print(f"{len(result['items'])} items, {len(bad)} wrong: {bad[:4]}; fp8 ceiling "
          f"{result['items'][0]['ceiling']:.0f} TFLOP/s")
    ratios: dict[Any, list[tuple[float, ...]]] = {}
    for item in sorted(result["items"], key=lambda one: (one["extra"], one["rows"])):
        us = item["us"]
        ours = sorted((value, name) for name, value in us.items() if "e41" in name)
        if not ours:
            continue
        n, k, _ = LINEARS[item["linear"]]
        best, fast, slow, bf16, whole = (next(value for name, value in us.items() if "e41" in name), us["scaled_mm fast"],
                                         us["scaled_mm"], us.get("bf16", 0.0), us["quantise+"])
        ratios.setdefault((item["extra"], item["rows"]), []).append((slow / best, fast / best, bf16 / best, bf16 / whole))
        print(f"{item['linear']:11s} {item['rows']:5d} {item['extra']:8s} {slow / best:.3f} {fast / best:.3f} "
              f"torch {fast:.1f} fast, {slow:.1f}; bf16 {bf16:.1f}, packed {us.get('packed', 0.0):.1f}; "
              f"quantise+ {whole:.1f}; {2e-6 * item['rows'] * n * k / best:.0f} TFLOP/s; "
              + "; ".join(f"{value:.1f} {name.split('_bf_bf_')[1].replace('de1_e41_', '')}" for value, name in ours[:5]))
    for key, values in ratios.items():
        means = [geometric_mean(column) for column in zip(*values, strict=True)]
        print(key, "the rule's {:.3f}x torch, {:.3f}x torch with fast sums, {:.3f}x bf16, {:.3f}x quantising".format(*means),
              f"over {len(values)}, least {min(value[0] for value in values):.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "build_checks", "run", "child", "report"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("fp8-matmul.json"))
    parser.add_argument("--limit", type=float, default=90, help="seconds")
    options = parser.parse_args()
    if options.command == "build":
        build(options.folder)
    elif options.command == "build_checks":
        build_checks(options.folder)
    elif options.command == "report":
        report(json.loads(options.out.read_text()))
    elif options.command == "child":
        return child(options.folder, options.out, time.time() + options.limit, Fp8Turns)
    else:
        report(run(options.folder, options.out, options.limit, __file__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
