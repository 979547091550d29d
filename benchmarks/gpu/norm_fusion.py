"""Norms inside the kernels for few rows against norms as kernels of their own: checks, then chains of whole layers' matmuls.

    python -m benchmarks.gpu.norm_fusion build .carry/fuse                      # anywhere with nvcc, no GPU needed
    python benchmarks/gpu/norm_fusion.py run .carry/fuse --out DIR --limit 100      # on the GPU: TVM runtime and torch

A chain is qkv, o, [norm], gate_up, down, [norm] over 12 layers of their own weights, launched dependently, one graph; what
attention would give is a constant. For each model and weight format: norms of their own, norms inside, then one kernel after
the other with other tilings, keeping what makes the whole chain faster. Writes DIR/norm-fusion.json after each item.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.kernel_libraries import compile_parts
from benchmarks.gpu.matmul_bench import Bench, copies_to_rotate
from benchmarks.gpu.matmul_variants import LINEARS

LAYERS = 12
EPSILON = 1e-5
CHAINS = (("8b", "q4_1"), ("8b", "q4_0"), ("8b", "q4_128"), ("8b", "q8_0"), ("1b", None), ("8b", None), ("7b", None))
HEADS = (("1b", None), ("8b", None), ("8b", "q4_1"), ("8b", "q4_0"), ("8b", "q8_0"))
PARTS = ("qkv", "o", "gate_up", "down")
ROWS = (1, 2, 4, 8)
# Kernel, warps, unroll, then ahead ("bulk": stages), strips ("groups": rows of x), blocks_per_sm.
Config = tuple[str, int, int, int, int, int]


def rule(n: int, k: int, swiglu: bool, weight: str | None, rows: int) -> Config:
    """What `linear.py` picks for so many rows."""
    from relaxpack.kernel_spec import LinearSpec
    from relaxpack.schedules.kernels.cuda.linear_rules import hopper_plan, quantized_plan
    from relaxpack.weight_format import FORMATS

    if weight is None:
        family, options = hopper_plan(n, k, rows, swiglu)
    else:
        spec = LinearSpec(n, k, FORMATS[weight], "decode", "bfloat16", "bfloat16", max_rows=rows,
                          glu="swiglu" if swiglu else None)
        family, options = quantized_plan(spec, rows, True)
    kernel = {"gemm_rows_bulk": "bulk", "gemm_group_columns": "groups"}.get(family, "rows")
    return (kernel, options["warps"], options["unroll"], int(options.get("stages", options.get("ahead", False))),
            options["columns"] if kernel == "groups" else options.get("strips", 1), options.get("blocks_per_sm", 0))


def configs(k: int, weight: str | None) -> list[Config]:
    """Registers are limited to what the last number lets be there at once: 64 for 1024 threads, 128 for 512."""
    if weight is None:
        plain = [(16, 2, 0, 1, 2), (8, 2, 0, 1, 4), (8, 4, 0, 1, 2), (16, 1, 1, 1, 2), (16, 2, 1, 1, 1),
                 (8, 2, 1, 1, 2), (16, 4, 0, 1, 1), (8, 1, 1, 1, 4), (8, 2, 0, 1, 3), (32, 1, 0, 1, 1)]
    else:
        plain = [(16, 2, 1, 1, 2), (8, 2, 0, 1, 4), (8, 4, 0, 1, 3), (8, 1, 0, 2, 4)]
    found: list[Config] = [("rows", *c) for c in plain if c[0] * c[1] * (1 + c[2]) * 64 <= k]
    if weight in ("q4_0", "q4_1", "q4_128"):
        single = [(8, 1, 0, 1, 4), (8, 1, 1, 1, 4), (8, 1, 1, 1, 3), (8, 1, 1, 1, 2), (8, 2, 0, 1, 3), (16, 1, 0, 1, 2),
                  (16, 1, 0, 1, 1), (16, 1, 1, 1, 1), (8, 2, 1, 1, 2), (14, 1, 0, 1, 2), (14, 1, 1, 1, 1), (14, 2, 0, 1, 1),
                  (7, 2, 1, 1, 2)]
        found += [("groups", *c) for c in single if c[0] * c[1] * (1 + c[2]) * 256 <= k]
    if weight is not None:
        found += [("bulk", *c) for c in ((8, 2, 4, 1, 3), (8, 4, 2, 1, 3), (16, 2, 2, 1, 2), (16, 4, 1, 1, 2))
                  if c[0] * c[1] * 64 <= k]
    return found


def head_configs(weight: str | None) -> list[Config]:
    found: list[Config] = [("rows", 8, 2, 0, 1, 4), ("rows", 8, 1, 1, 1, 4)]
    if weight is not None:
        found += [("rows", 8, 1, 0, 2, 4), ("rows", 8, 4, 0, 1, 3), ("bulk", 4, 4, 4, 1, 4)]
    if weight in ("q4_0", "q4_1"):
        found += [("groups", 8, 1, 1, 1, 4), ("groups", 4, 2, 1, 1, 5), ("groups", 8, 2, 0, 1, 3), ("groups", 4, 1, 1, 1, 8)]
    return found


def name_of(part: str, model: str, weight: str | None, config: Config, role: str) -> str:
    return f"chain_{model}_{weight or 'bf16'}_{part}_{role}_" + "_".join(str(c) for c in config)


# --- building machine -------------------------------------------------------------------------------------------------

def kernel(n: int, k: int, weight: str | None, config: Config, name: str, **options: Any) -> Any:
    from relaxpack.schedules.kernels.cuda.gemm_group_columns import gemm_group_columns
    from relaxpack.schedules.kernels.cuda.gemm_rows import gemm_rows
    from relaxpack.schedules.kernels.cuda.gemm_rows_bulk import gemm_rows_bulk
    from relaxpack.schedules.kernels.cuda.gemm_rows_quant import gemm_rows_quant
    from relaxpack.weight_format import FORMATS

    kind, warps, unroll, ahead, strips, blocks = config
    more = {"rows": {"ahead": bool(ahead), "strips": strips}, "bulk": {"stages": ahead},
            "groups": {"ahead": bool(ahead), "columns": strips}}[kind]
    common: dict[str, Any] = {"warps": warps, "unroll": unroll, "blocks_per_sm": blocks, "dependent_launch": True,
                              "name": name, **more, **options}
    out_dtype = common.pop("out_dtype", "bfloat16")
    common["glu"] = "swiglu" if common.pop("swiglu", False) else None
    if weight is None:
        return gemm_rows(n, k, "bfloat16", out_dtype, **common)
    make = {"rows": gemm_rows_quant, "bulk": gemm_rows_bulk, "groups": gemm_group_columns}[kind]
    return make(n, k, FORMATS[weight], "bfloat16", out_dtype, **common)


def role_options(part: str, role: str) -> dict[str, Any]:
    """role: "plain" or "folded"."""
    if role == "plain":
        return {"swiglu": part == "gate_up"}
    if part in ("o", "down"):
        return {"residual": True, "prepares_norm": True}
    return {"swiglu": part == "gate_up", "norm_epsilon": EPSILON}


def kernels() -> dict[str, tuple[Any, ...]]:
    """Name → arguments of `kernel`."""
    found: dict[str, tuple[Any, ...]] = {}
    for model, weight in CHAINS:
        for part in PARTS:
            n, k, swiglu = LINEARS[f"{model}.{part}"]
            mine = {rule(n, k, swiglu, weight, rows) for rows in ROWS}
            for config, role in [*((c, role) for c in mine for role in ("plain", "folded")),
                                 *((c, "folded") for c in configs(k, weight))]:
                found[name_of(part, model, weight, config, role)] = (n, k, weight, config, role_options(part, role))
    for model, weight in HEADS:
        n, k, swiglu = LINEARS[f"{model}.head"]
        for config in {rule(n, k, swiglu, weight, 1), *head_configs(weight)}:
            found[name_of("head", model, weight, config, "folded")] = (
                n, k, weight, config, {"norm_epsilon": EPSILON, "out_dtype": "float32"})
    for weight in (None, "q4_0", "q4_1", "q4_128", "q8_0", "fp8"):
        for part, (n, k) in (("o", (1072, 1088)), ("qkv", (1040, 2112)), ("gate_up", (1056, 1088))):
            four: tuple[Config, ...] = (("groups", 8, 1, 1, 1, 4), ("groups", 4, 2, 0, 2, 2), ("groups", 4, 1, 1, 4, 2))
            eight: tuple[Config, ...] = (("bulk", 4, 2, 2, 1, 3),) if weight is not None else ()
            for config in (("rows", 8, 2, 0, 1, 4), ("rows", 4, 2, 1, 2, 2), *eight,
                           *(four if weight in ("q4_0", "q4_1", "q4_128") else ())):
                name = f"check_{weight or 'bf16'}_{part}_" + "_".join(str(c) for c in config)
                found[name] = (n, k, weight, config, role_options(part, "folded"))
    return found


def build(folder: Path, only: tuple[str, ...] = ("",)) -> None:
    """`only`: how the names of the kernels begin that are wanted ("check": no chains)."""
    from relaxpack.kernel_spec import NormSpec
    from relaxpack.schedules.kernels.cuda.norm import norm

    made = {name: partial(kernel, n, k, weight, config, name, **options)
            for name, (n, k, weight, config, options) in kernels().items()}
    for h in (2048, 3584, 4096):
        made[f"norm_{h}"] = partial(norm, NormSpec(h, EPSILON, "bfloat16", True), dependent_launch=True, name=f"norm_{h}")
    wanted = {name: made[name] for name in sorted(made) if name.startswith(only)}
    index = compile_parts(folder, "fuse", wanted)
    checks = {name: [n, k, weight, options] for name, (n, k, weight, _, options) in kernels().items()
              if name.startswith("check")}
    rules = {f"{model} {weight} {rows}": {part: rule(*LINEARS[f"{model}.{part}"], weight, rows) for part in (*PARTS, "head")
                                          if f"{model}.{part}" in LINEARS}
             for model, weight in CHAINS for rows in ROWS}
    (folder / "index.json").write_text(json.dumps({"kernels": index, "checks": checks, "rules": rules}))


# --- GPU machine ------------------------------------------------------------------------------------------------------

class Run:
    def __init__(self, folder: Path, out: Path, limit: float) -> None:
        self.bench, self.index = Bench(folder), json.loads((folder / "index.json").read_text())
        self.torch = self.bench.torch
        self.out, self.until, self.started = out / "norm-fusion.json", time.time() + limit, time.time()
        self.result: dict[str, Any] = {"device": self.torch.cuda.get_device_name(), "ceilings": self.bench.ceilings(),
                                       "checks": [], "chains": [], "failures": []}

    def save(self) -> None:
        self.result["seconds"] = round(time.time() - self.started, 1)
        self.out.write_text(json.dumps(self.result))

    def function(self, name: str) -> Any:
        return self.bench.kernel({"library": self.index["kernels"][name]["library"], "name": name})

    def weights(self, n: int, k: int, weight: str | None, swiglu: bool, copies: int = 1) -> tuple[list[list[Any]], Any]:
        sets, canonical = self.bench.packed({"n": n, "k": k, "dtype": "bfloat16", "weight": weight,
                                             "options": {"swiglu": swiglu}}, copies)
        return [[self.bench.view(b) for b in one] for one in sets], canonical

    # numbers

    def check(self, name: str, n: int, k: int, weight: str | None, options: dict[str, Any]) -> None:
        torch, swiglu = self.torch, options.get("swiglu", False)
        (buffers,), canonical = self.weights(n, k, weight, swiglu)
        plain = (torch.from_numpy(canonical.dequantize()).cuda() if canonical else buffers[0]).double()
        if canonical is not None and swiglu:
            plain = plain[torch.arange(n, device="cuda").reshape(2, n // 16, 8).transpose(0, 1).reshape(-1)]
        for t in (1, 3, 8):
            x = self.bench.random((t, k), "bfloat16")
            width = n // 2 if swiglu else n
            y, again = (torch.full((t, width), float("nan"), device="cuda", dtype=x.dtype) for _ in range(2))
            z = x.double() @ plain.T
            if options.get("prepares_norm"):
                residual, weight_of_norm = self.bench.random((t, n), "bfloat16", 3.0), self.bench.random((n,), "float32")
                scaled = torch.full_like(y, float("nan"))
                squares = torch.full((t, n // 16), float("nan"), device="cuda")
                for out in (again, y):
                    self.function(name)(x, *buffers, residual, weight_of_norm, out, scaled, squares)
                z = z + residual.double()
                sums = y.double().square().reshape(t, -1, 16).sum(-1)
                extra = bool(torch.equal(scaled, (y.float() * weight_of_norm).bfloat16())) \
                    and bool(((squares.double() - sums).abs() <= 1e-6 * sums).all())
            else:
                squares = torch.rand((t, k // 16), device="cuda", generator=self.bench.generator) * 40
                for out in (again, y):
                    self.function(name)(x, *buffers, squares, out)
                z = z / (squares.double().sum(-1, keepdim=True) / k + EPSILON).sqrt()
                if swiglu:
                    pairs = z.reshape(t, n // 16, 2, 8)
                    gate, up = pairs[:, :, 0].reshape(t, width), pairs[:, :, 1].reshape(t, width)
                    z = gate * torch.sigmoid(gate) * up
                extra = True
            error = float((y.double() - z).norm() / z.norm())
            self.result["checks"].append({"name": name, "t": t, "error": error, "ok": error < 4e-3 and extra,
                                          "same_again": bool(torch.equal(y, again))})

    # times

    def chain(self, model: str, weight: str | None, rows: int, roles: dict[str, str], choice: dict[str, Config],
              layers: list[dict[str, list[Any]]], state: dict[str, Any]) -> tuple[float, Any]:
        """(microseconds per layer, the last residual stream)."""
        torch, h = self.torch, LINEARS[f"{model}.o"][0]
        run = {part: self.function(name_of(part, model, weight, choice[part], roles[part])) for part in PARTS}
        folded = roles["o"] != "plain"
        norm, g = self.function(f"norm_{h}"), state["g"]
        bf16 = partial(torch.empty, device="cuda", dtype=torch.bfloat16)
        qkv, middle = bf16((rows, LINEARS[f"{model}.qkv"][0])), bf16((rows, LINEARS[f"{model}.down"][1]))
        streams, y, product = [bf16((rows, h)) for _ in range(2)], bf16((rows, h)), bf16((rows, h))
        squares = torch.empty((rows, h // 16), device="cuda")
        calls: list[Any] = []

        def reset() -> None:
            streams[0].copy_(state["x"])
            y.copy_(state["x"])
            squares.fill_(16 * (1 - EPSILON))       # the first layer takes its input as it is

        at = 0
        for one in layers:
            for first, second, into in (("qkv", "o", qkv), ("gate_up", "down", middle)):
                middle_x = state["attention"] if first == "qkv" else middle
                old, new = streams[at], streams[1 - at]
                if folded:
                    calls.append(partial(run[first], y, *one[first], squares, into))
                    calls.append(partial(run[second], middle_x, *one[second], old, g, new, y, squares))
                else:
                    calls.append(partial(run[first], y, *one[first], into))
                    calls.append(partial(run[second], middle_x, *one[second], product))
                    calls.append(partial(norm, product, old, g, new, y))
                at = 1 - at
        reset()
        for call in calls:
            call()
        torch.cuda.synchronize()
        end = streams[at].clone()
        us = self.bench.time(calls, 21) * len(calls) / len(layers)
        return us, end

    def compare(self, model: str, weight: str | None) -> None:
        torch = self.torch
        shapes = {part: LINEARS[f"{model}.{part}"] for part in PARTS}
        h = shapes["o"][0]
        layers: list[dict[str, list[Any]]] = [{} for _ in range(LAYERS)]
        for part, (n, k, swiglu) in shapes.items():
            for layer in layers:                # every layer has numbers of its own
                layer[part] = self.weights(n, k, weight, swiglu)[0][0]
        size = sum(sum(b.numel() * b.element_size() for b in one) for one in layers[0].values())
        eight: dict[str, Config] = {part: tuple(c) for part, c in self.index["rules"][f"{model} {weight} 8"].items()}
        for rows in ROWS:
            mine: dict[str, Config] = {part: tuple(c) for part, c in self.index["rules"][f"{model} {weight} {rows}"].items()}
            state = {"x": self.bench.random((rows, h), "bfloat16"), "attention": self.bench.random((rows, h), "bfloat16"),
                     "g": self.bench.random((h,), "float32").abs() + 0.5}

            def note(what: str, us: float, choice: dict[str, Config], error: float, rows: int = rows) -> None:
                self.result["chains"].append({"model": model, "weight": weight or "bf16", "rows": rows, "what": what,
                                              "us_per_layer": us, "tb_s": size / us / 1e6, "choice": choice, "error": error})
                self.save()

            plain = dict.fromkeys(PARTS, "plain")
            self.chain(model, weight, rows, plain, mine, layers, state)
            us, expected = self.chain(model, weight, rows, plain, mine, layers, state)
            note("norms of their own", us, mine, 0.0 if bool(expected.isfinite().all()) else float("nan"))
            choice, roles = dict(mine), dict.fromkeys(PARTS, "folded")
            for _ in range(2):
                best, end = self.chain(model, weight, rows, roles, choice, layers, state)
                note("norms inside", best, mine, self.difference(end, expected))
            if mine != eight:
                us, end = self.chain(model, weight, rows, roles, eight, layers, state)
                note("norms inside, kernels for eight rows", us, eight, self.difference(end, expected))
            if rows > 1:
                continue
            for part in PARTS:
                for config in configs(shapes[part][1], weight):
                    if time.time() > self.until:
                        return
                    if name_of(part, model, weight, config, "folded") not in self.index["kernels"]:
                        continue
                    tried = choice | {part: config}
                    us, end = self.chain(model, weight, rows, roles, tried, layers, state)
                    note(f"{part} {config}", us, tried, self.difference(end, expected))
                    if us < best:
                        best, choice = us, tried
        torch.cuda.empty_cache()

    def heads(self) -> None:
        """The LM head by itself, over copies of its weight."""
        for model, weight in HEADS:
            mine = tuple(self.index["rules"][f"{model} {weight} 1"]["head"])
            if name_of("head", model, weight, mine, "folded") not in self.index["kernels"]:
                continue
            n, k, _ = LINEARS[f"{model}.head"]
            copies, _ = self.weights(n, k, weight, False, copies_to_rotate(n * k))
            x, y = self.bench.random((1, k), "bfloat16"), self.torch.empty((1, n), device="cuda")
            squares = self.torch.rand((1, k // 16), device="cuda")
            size = sum(b.numel() * b.element_size() for b in copies[0])
            for config in [mine, *head_configs(weight), mine]:
                function = self.function(name_of("head", model, weight, tuple(config), "folded"))
                us = self.bench.time([partial(function, x, *b, squares, y) for b in copies], 21)
                self.result["chains"].append({"model": model, "weight": weight or "bf16", "rows": 1,
                                              "what": f"head {config}", "us_per_layer": us, "tb_s": size / us / 1e6,
                                              "choice": {"head": config}, "error": 0.0})
            del copies
            self.torch.cuda.empty_cache()
        self.save()

    def difference(self, got: Any, expected: Any) -> float:
        return float((got.double() - expected.double()).norm() / expected.double().norm())

    def all(self) -> None:
        for name, (n, k, weight, options) in self.index["checks"].items():
            try:
                self.check(name, n, k, weight, options)
            except Exception as error:      # one broken kernel must not hide the others
                self.result["failures"].append({"name": name, "error": f"{type(error).__name__}: {error}"[:400]})
        self.save()
        for model, weight in CHAINS:
            if time.time() > self.until:
                break
            if not any(name.startswith(f"chain_{model}_{weight or 'bf16'}_o") for name in self.index["kernels"]):
                continue
            try:
                self.compare(model, weight)
            except Exception as error:
                self.result["failures"].append({"name": f"{model} {weight}",
                                                "error": f"{type(error).__name__}: {error}"[:400]})
            self.save()
        if time.time() < self.until:
            self.heads()


def table(result: dict[str, Any]) -> None:
    bad = [c for c in result["checks"] if not (c["ok"] and c["same_again"])]
    print(f"{result['device']} {result['seconds']} s, ceilings {result['ceilings']}, {len(result['checks'])} checks, "
          f"{len(bad)} bad, {len(result['failures'])} failures")
    for entry in [*bad, *result["failures"]][:30]:
        print("  BAD", entry)
    best: dict[tuple[str, ...], float] = {}
    for c in result["chains"]:
        key = (c["model"], c["weight"], str(c["rows"]))
        mark = "*" if c["us_per_layer"] < best.get(key, float("inf")) else " "
        best[key] = min(best.get(key, float("inf")), c["us_per_layer"])
        print(f" {mark} {c['model']} {c['weight']:5s} {c['rows']} rows {c['what']:34s} {c['us_per_layer']:7.2f} us a layer "
              f"{c['tb_s']:5.2f} TB/s, differs by {c['error']:.1e}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--limit", type=float, default=100, help="seconds")
    parser.add_argument("--only", nargs="*", default=[""], help="build: how the names of the wanted kernels begin")
    options = parser.parse_args()
    if options.command == "build":
        build(options.folder, tuple(options.only))
        return 0
    run = Run(options.folder, options.out, options.limit)
    run.all()
    table(run.result)
    return int(bool(run.result["failures"]) or any(not c["ok"] for c in run.result["checks"]))


if __name__ == "__main__":
    sys.exit(main())
