"""Every CPU kernel against plain NumPy in float64, at every instruction set this machine can run. Outputs start as NaN.

Quantised linears are compared twice: tightly with the same int8-rounded activations, and with the exact product within
the bound that rounding implies (half a step of each activation times the weights' magnitudes).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
import tvm
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import AttentionSpec, EmbeddingSpec, Kernel, LinearSpec, NormSpec
from relaxpack.model_info import FP8
from relaxpack.schedules.kernels.cpu.layout import stored_as
from relaxpack.schedules.kernels.cpu.provider import CpuKernels
from relaxpack.target import TargetSpec, host_cpu_features, parse_target
from relaxpack.weight_format import E4M3, FORMATS, QuantizedTensor, WeightFormat
from tests.helpers.matmul_case import activation

_AVX2 = ("avx2", "fma", "f16c")
LEVELS = {
    "avx2": lambda: parse_target("cpu:x86-64-v3"),
    "avx2-vnni": lambda: TargetSpec("cpu", "alderlake", (*_AVX2, "avxvnni")),
    "avx512": lambda: parse_target("cpu:x86-64-v4"),
    "avx512-vnni": lambda: TargetSpec("cpu", "cascadelake", (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512vnni")),
}


@cache
def provider(level: str) -> CpuKernels:
    target = LEVELS[level]()
    missing = set(target.features) - set(host_cpu_features())
    if missing:
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    return CpuKernels(target)


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return provider(request.param)


@pytest.fixture(params=["avx2", "avx512"])
def float_kernels(request: pytest.FixtureRequest) -> CpuKernels:
    """For kernels without byte dot products: VNNI changes nothing in them."""
    return provider(request.param)


@cache
def compiled(kernels: CpuKernels, kernel_id: int) -> tvm.runtime.Module:
    stage, = next(k for k in kernels._kernels.values() if id(k) == kernel_id).stages
    target = kernels.target.to_tvm()
    with target:
        return tvm.compile(tvm.IRModule({"f": stage.func.with_attr("global_symbol", "f")}), target)


def run(kernels: CpuKernels, kernel: Kernel, values: dict[str, object],
        outputs: dict[str, tuple[int, ...]]) -> list[np.ndarray]:
    """Compile the kernel's only stage and call it. Outputs are poisoned; arrays in `inplace` are updated in `values`."""
    stage, = kernel.stages
    module = compiled(kernels, id(kernel))
    args = [values[n] if n == "layer" else tvm.runtime.tensor(np.ascontiguousarray(values[n])) for n in stage.inputs]
    results = [tvm.runtime.tensor(np.full(outputs[n], np.nan, "float32")) for n in stage.outputs]
    module["f"](*args, *results)
    for name in stage.inplace:
        values[name] = args[stage.inputs.index(name)].numpy()
    return [r.numpy() for r in results]


def random_weight(fmt: WeightFormat, n: int, k: int, seed: int = 0) -> np.ndarray | QuantizedTensor:
    rng = np.random.default_rng(seed)
    if not fmt.quantized:
        return rng.standard_normal((n, k)).astype("float16" if fmt.name == "f16" else "float32")
    low, high = {"q5_0": (-16, 15), "q6_k": (-32, 31), "q8_0": (-128, 127)}.get(
        fmt.name, (0, 15 if fmt.bits == 4 else 31))
    codes = rng.integers(low, high, (n, k), endpoint=True).astype("int8" if fmt.signed else "uint8")
    codes[0], codes[-1] = low, high  # the ends of the range, all along a row
    shape = (n, fmt.groups(k))
    signs = rng.choice([-1, 1], shape)
    scales = (signs * rng.uniform(0.5, 1.5, shape) / high).astype(fmt.scale_dtype)
    lows = rng.standard_normal(shape).astype(fmt.scale_dtype) if fmt.minimum == "stored" else None
    zeros = rng.integers(0, 16, shape).astype("uint8") if fmt.zeros else None
    return QuantizedTensor(fmt, codes, scales, lows, zeros)


def exact(weight: np.ndarray | QuantizedTensor, fmt: WeightFormat) -> np.ndarray:
    """The stored numbers in float64."""
    if isinstance(weight, QuantizedTensor):
        return weight.dequantize().astype("float64")
    if fmt.name == "bf16":
        bits = weight.view(np.uint32)
        weight = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
    return weight.astype("float64")


def rounded(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Activations as the kernels round them, and half a rounding step of each."""
    groups = x.reshape(len(x), -1, group)
    largest = np.abs(groups).max(-1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / np.maximum(largest, np.float32(1e-30))))
    value = codes.astype("float64") * (largest * np.float32(1 / 127))
    step = np.broadcast_to(largest / 254 * 1.001, groups.shape)
    return value.reshape(x.shape), step.reshape(x.shape)


def finish(product: np.ndarray, spec: LinearSpec, bias: np.ndarray, residual: np.ndarray) -> np.ndarray:
    y = product + (bias if spec.bias else 0)
    if spec.gated:
        gate, up = np.split(y, 2, axis=1)
        y = activation(spec.glu, gate) * up
    return y + (residual if spec.residual else 0)


def check_linear(kernels: CpuKernels, spec: LinearSpec, rows: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed + 1)
    fmt, n, k = spec.weight, spec.out_features, spec.in_features
    weight = random_weight(fmt, n, k, seed)
    layout = kernels.weight_layout(fmt, n, k, spec.gated)
    packed = kernels.pack(layout, weight)
    for suffix, shape, dtype in layout.buffers:
        assert packed[suffix].shape == shape and packed[suffix].dtype == dtype
    columns = n // 2 if spec.gated else n
    x = rng.standard_normal((rows, k)).astype("float32") * np.exp(rng.standard_normal((rows, k))).astype("float32")
    x[-1, :fmt.group_size or 3] = 0  # a group without a largest value
    bias, residual = rng.standard_normal(n).astype("float32"), rng.standard_normal((rows, columns)).astype("float32")
    scale = np.float32(1 / np.sqrt(k))
    x *= scale
    y, = run(kernels, kernels.linear(spec), {"x": x, "weight": packed[""], "bias": bias, "residual": residual},
             {"y": (rows, columns)})
    w = exact(weight, fmt)
    used, step = rounded(x, stored_as(fmt).group_size) if fmt.quantized else (x.astype("float64"), None)
    expected = finish(used @ w.T, spec, bias, residual)
    magnitude = np.abs(used) @ np.abs(w).T
    if isinstance(weight, QuantizedTensor) and weight.format.name in ("q4_0", "q4_128"):
        size = weight.format.group_size
        magnitude = magnitude + np.abs(used) @ np.abs(weight.codes * np.repeat(weight.scales, size, 1)[:, :k].astype("f8")).T
    bound = 3e-6 * magnitude.max() * (4 * np.abs(expected).max() if spec.gated else 1) + 1e-6
    assert np.abs(y - expected).max() <= bound, (np.abs(y - expected).max(), bound)
    if step is not None and not spec.gated:
        limit = step @ np.abs(w).T + bound
        assert (np.abs(y - finish(x.astype("float64") @ w.T, spec, bias, residual)) <= limit).all()


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", [name for name, f in FORMATS.items() if not f.e4m3])
def test_linear_every_format(kernels: CpuKernels, name: str, phase: str) -> None:
    fmt = FORMATS[name]
    if not fmt.quantized and kernels.isa.vnni:
        pytest.skip("float kernels do not use VNNI")
    k = 96 if fmt.quantized else 77
    for rows in (1, 5):
        check_linear(kernels, LinearSpec(70, k, fmt, phase, "float32", "float32"), rows)


@pytest.mark.parametrize("name", ["f32", "q4_1"])
@pytest.mark.parametrize("options", [{"bias": True}, {"residual": True}, {"bias": True, "residual": True},
                                     {"glu": "swiglu"}, {"glu": "swiglu", "bias": True},
                                     {"glu": "geglu", "bias": True}], ids=str)
def test_linear_epilogues(float_kernels: CpuKernels, name: str, options: dict[str, Any]) -> None:
    n = 84  # whole panels and a partial one, also where gate and up share them
    check_linear(float_kernels, LinearSpec(n, 64, FORMATS[name], "decode", "float32", "float32", **options), 3)


@pytest.mark.parametrize("name", ["f32", "bf16", "q4_1", "q6_k"])
def test_linear_many_rows(kernels: CpuKernels, name: str) -> None:
    for rows in (2, 8, 9, 131):
        check_linear(kernels, LinearSpec(40, 256, FORMATS[name], "prefill", "float32", "float32", residual=True), rows)


@pytest.mark.parametrize("name", ["f32", "q4_0", "q8_0"])
def test_linear_row_does_not_depend_on_the_batch(kernels: CpuKernels, name: str) -> None:
    fmt = FORMATS[name]
    weight = random_weight(fmt, 64, 128)
    packed = kernels.pack(kernels.weight_layout(fmt, 64, 128, False), weight)[""]
    x = np.random.default_rng(5).standard_normal((11, 128)).astype("float32")
    results = []
    for phase in ("decode", "prefill"):
        kernel = kernels.linear(LinearSpec(64, 128, fmt, phase, "float32", "float32"))
        for rows in (slice(0, 11), slice(4, 5)):
            y, = run(kernels, kernel, {"x": x[rows], "weight": packed}, {"y": (len(x[rows]), 64)})
            results.append(y[4] if len(y) > 1 else y[0])
    for other in results[1:]:
        assert (results[0] == other).all()


@pytest.mark.parametrize("factor", [1.0, 45.25])
@pytest.mark.parametrize("name", [name for name, f in FORMATS.items() if not f.e4m3])
def test_embedding_reads_the_linear_layout(float_kernels: CpuKernels, name: str, factor: float) -> None:
    fmt = FORMATS[name]
    table = random_weight(fmt, 75, 96)
    packed = float_kernels.pack(float_kernels.weight_layout(fmt, 75, 96, False), table)[""]
    ids = np.array([0, 74, 31, 32, 16, 15, 47, 48, 3, 74, 1], "int32")
    kernel = float_kernels.embedding(EmbeddingSpec(75, 96, fmt, "float32", factor))
    y, = run(float_kernels, kernel, {"token_ids": ids, "weight": packed}, {"y": (len(ids), 96)})
    np.testing.assert_allclose(y, exact(table, fmt)[ids] * factor, rtol=3e-6, atol=3e-6 * factor)


@pytest.mark.parametrize("size", [64, 576, 77, 1000])
@pytest.mark.parametrize("residual", [False, True])
def test_norm(float_kernels: CpuKernels, size: int, residual: bool) -> None:
    rng = np.random.default_rng(size)
    kernel = float_kernels.norm(NormSpec(size, 1e-5, "float32", residual))
    for rows in (1, 19):
        x, r = rng.standard_normal((2, rows, size)).astype("float32")
        w = rng.standard_normal(size).astype("float32")
        out = run(float_kernels, kernel, {"x": x, "residual": r, "weight": w}, {"total": x.shape, "y": x.shape})
        total = x.astype("float64") + (r if residual else 0)
        if residual:
            np.testing.assert_array_equal(out[0], x + r)
        expected = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-5) * w
        np.testing.assert_allclose(out[-1], expected, rtol=2e-6, atol=1e-6)


# ---- attention ----

def attention_spec(**changes: object) -> AttentionSpec:
    given = dict(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=64, page_size=16, max_pages=16,
                 max_position=300, activation_dtype="float32", kv_dtype="float32", scale=0.0)
    given.update(changes)
    if "head_dim" in changes and "rotary_dim" not in changes:
        given["rotary_dim"] = changes["head_dim"]
    given["scale"] = given["head_dim"] ** -0.5  # type: ignore[operator]
    return AttentionSpec(**given)  # type: ignore[arg-type]


def random_pages(spec: AttentionSpec, lengths: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pages and a shuffled page table; everything no sequence owns is NaN, so that reading it shows."""
    rng = np.random.default_rng(seed)
    counts = [-(-n // spec.page_size) for n in lengths]
    order = rng.permutation(sum(counts)) + 1
    shape = (spec.num_layers, sum(counts) + 1, 2, spec.num_kv_heads, spec.page_size, spec.head_dim)
    pages = unowned(spec, shape)
    table = np.zeros((len(lengths), spec.max_pages), "int32")
    taken = 0
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        assert count <= spec.max_pages
        table[s, :count] = order[taken:taken + count]
        taken += count
        for i in range(length):
            pages[:, table[s, i // spec.page_size], :, :, i % spec.page_size] = stored(spec, rng.standard_normal(
                (spec.num_layers, 2, spec.num_kv_heads, spec.head_dim)))
    return pages, table


def unowned(spec: AttentionSpec, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, 0x7F, np.uint8) if spec.fp8 else np.full(shape, np.nan, spec.kv_dtype)


def stored(spec: AttentionSpec, values: np.ndarray) -> np.ndarray:
    """As pages hold them."""
    if spec.fp8:
        return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return values.astype(spec.kv_dtype)


def read(pages: np.ndarray) -> np.ndarray:
    return (E4M3[pages] if pages.dtype == np.uint8 else pages).astype("float64")


def attend(spec: AttentionSpec, q: np.ndarray, pages: np.ndarray, row: np.ndarray, layer: int, position: int) -> np.ndarray:
    """float64 attention of one query at `position`."""
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    at = np.arange(first, position + 1)
    kv = read(pages[layer, row[at // spec.page_size], :, :, at % spec.page_size])  # [n, 2, KV, D]
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (np.repeat(kv[:, i], group, axis=1) for i in (0, 1))
    scores = np.einsum("hd,nhd->hn", q.reshape(spec.num_heads, -1).astype("float64"), keys) * spec.scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hn,nhd->hd", weights / weights.sum(-1, keepdims=True), values).reshape(-1)


ATTENTION_CASES = {
    "gqa": {}, "mha": {"num_kv_heads": 4}, "mqa": {"num_kv_heads": 1}, "group3": {"num_heads": 9, "num_kv_heads": 3},
    "page1": {"page_size": 1, "max_pages": 256}, "page8": {"page_size": 8, "max_pages": 32},
    "page64": {"page_size": 64, "max_pages": 4}, "window": {"window": 7}, "window100": {"window": 100},
    "f16": {"kv_dtype": "float16"}, "f16page1": {"kv_dtype": "float16", "page_size": 1, "max_pages": 256},
    "d32": {"head_dim": 32}, "d80": {"head_dim": 80}, "d96": {"head_dim": 96}, "d128": {"head_dim": 128},
    "d256": {"head_dim": 256}, "d20": {"head_dim": 20}, "d40f16": {"head_dim": 40, "kv_dtype": "float16"},
    "e4m3": {"kv_dtype": FP8}, "d40e4m3": {"head_dim": 40, "kv_dtype": FP8, "window": 33},
}


@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_decode_attention(float_kernels: CpuKernels, case: str) -> None:
    spec = attention_spec(**ATTENTION_CASES[case])
    kernel = float_kernels.decode_attention(spec)
    for lengths in ([1, 17, 64, 200, 15, 16, 65, 129, 2, 33], [150]):  # without and with parts
        pages, table = random_pages(spec, lengths)
        q = np.random.default_rng(3).standard_normal((len(lengths), spec.num_heads * spec.head_dim)).astype("float32")
        y, = run(float_kernels, kernel, {"q": q, "pages": pages, "page_table": table, "layer": 1,
                                   "lengths": np.array(lengths, "int32")}, {"y": q.shape})
        for s, length in enumerate(lengths):
            np.testing.assert_allclose(y[s], attend(spec, q[s], pages, table[s], 1, length - 1), rtol=1e-5, atol=3e-6)


def test_decode_attention_of_an_empty_row_is_zero(float_kernels: CpuKernels) -> None:
    spec = attention_spec()
    pages, table = random_pages(spec, [3])
    q = np.ones((1, spec.num_heads * spec.head_dim), "float32")
    y, = run(float_kernels, float_kernels.decode_attention(spec), {"q": q, "pages": pages, "page_table": table, "layer": 0,
                                                      "lengths": np.array([0], "int32")}, {"y": q.shape})
    assert (y == 0).all()


@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_prefill_attention(float_kernels: CpuKernels, case: str) -> None:
    spec = attention_spec(**ATTENTION_CASES[case])
    kernel = float_kernels.prefill_attention(spec)
    # (tokens of this step, tokens cached before): whole, chunk after a prefix, one token, page edges
    for steps in ([(5, 0), (1, 70), (49, 100), (16, 16), (1, 0), (130, 3)], [(200, 0)]):
        lengths = [new + cached for new, cached in steps]
        pages, table = random_pages(spec, lengths)
        starts = np.cumsum([0] + [new for new, _ in steps]).astype("int32")
        q = np.random.default_rng(4).standard_normal((starts[-1], spec.num_heads * spec.head_dim)).astype("float32")
        y, = run(float_kernels, kernel, {"q": q, "pages": pages, "page_table": table, "query_start": starts, "layer": 1,
                                   "lengths": np.array(lengths, "int32")}, {"y": q.shape})
        for s, (new, cached) in enumerate(steps):
            for i in range(new):
                expected = attend(spec, q[starts[s] + i], pages, table[s], 1, cached + i)
                np.testing.assert_allclose(y[starts[s] + i], expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("case", [
    {}, {"head_dim": 80, "rotary_dim": 32}, {"head_dim": 96}, {"head_dim": 20},
    {"head_dim": 32, "page_size": 2, "max_pages": 256},
    {"qk_norm_epsilon": 1e-6}, {"qk_norm_epsilon": 1e-6, "head_dim": 80, "rotary_dim": 20, "kv_dtype": "float16"},
    {"head_dim": 256, "kv_dtype": "float16", "num_kv_heads": 1, "page_size": 8}, {"kv_dtype": FP8},
    {"head_dim": 40, "rotary_dim": 20, "kv_dtype": FP8, "qk_norm_epsilon": 1e-6}], ids=str)
def test_rope_append(float_kernels: CpuKernels, case: dict[str, object]) -> None:
    spec = attention_spec(**case)
    heads, kv_heads, dim, half = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rotary_dim // 2
    rng = np.random.default_rng(8)
    angle = rng.uniform(0, 6, (spec.max_position, half))
    table = np.concatenate([np.cos(angle), np.sin(angle)], 1).astype("float32")
    for rows in (1, 9):
        qkv = rng.standard_normal((rows, (heads + 2 * kv_heads) * dim)).astype("float32")
        positions = rng.integers(0, spec.max_position, rows).astype("int32")
        slots = rng.permutation(8 * spec.page_size)[:rows].astype("int32")
        norms = rng.standard_normal((2, dim)).astype("float32")
        before = unowned(spec, (2, 8, 2, kv_heads, spec.page_size, dim))
        values = {"qkv": qkv, "rope_table": table, "positions": positions, "slots": slots, "q_norm": norms[0],
                  "k_norm": norms[1], "pages": before.copy(), "layer": 1}
        q, = run(float_kernels, float_kernels.rope_append(spec), values, {"q": (rows, heads * dim)})
        split = qkv.reshape(rows, heads + 2 * kv_heads, dim).astype("float64")
        turned = split[:, :heads + kv_heads].copy()
        if spec.qk_norm_epsilon is not None:
            turned /= np.sqrt((turned**2).mean(-1, keepdims=True) + spec.qk_norm_epsilon)
            turned *= np.repeat(norms, [heads, kv_heads], axis=0)
        cos, sin = (part[positions][:, None].astype("float64") for part in (table[:, :half], table[:, half:]))
        a, b = turned[..., :half].copy(), turned[..., half:2 * half].copy()
        turned[..., :half], turned[..., half:2 * half] = a * cos - b * sin, b * cos + a * sin
        np.testing.assert_allclose(q, turned[:, :heads].reshape(rows, -1), rtol=1e-5, atol=3e-6)
        written = values["pages"][1, slots // spec.page_size, :, :, slots % spec.page_size]      # [rows, 2, KV, D]
        # half a step of e4m3 is 2^-4 of a number at most, and 2^-10 of subnormal ones
        rtol, atol = {"float16": (1e-3, 3e-6), FP8: (2.0**-4 + 1e-5, 2.0**-10)}.get(spec.kv_dtype, (1e-5, 3e-6))
        np.testing.assert_allclose(read(written[:, 0]), turned[:, heads:], rtol=rtol, atol=atol)
        np.testing.assert_array_equal(written[:, 1], stored(spec, split[:, heads + kv_heads:]))
        values["pages"][1, slots // spec.page_size, :, :, slots % spec.page_size] = (
            before[1, slots // spec.page_size, :, :, slots % spec.page_size])
        np.testing.assert_array_equal(values["pages"], before)                                   # nothing else


def test_e4m3_pages_hold_rounded_and_saturated_numbers(float_kernels: CpuKernels) -> None:
    """Every code, every middle between two and what is just beside it, of both signs; beyond 448, infinite, NaN."""
    spec = attention_spec(num_heads=1, num_kv_heads=1, kv_dtype=FP8)
    codes = np.sort(E4M3[:0x7F])
    ties = (codes[1:] + codes[:-1]) / 2
    some = np.concatenate([codes, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e3)),
                           [448.01, 464, 1e4, 3e38, np.inf]]).astype("float32")
    some = np.concatenate([some, -some, [np.nan]])
    rows = -(-len(some) // 64)
    qkv = np.zeros((rows, 3, 64), "float32")
    qkv[:, 2] = np.resize(some, (rows, 64))
    values = {"qkv": qkv.reshape(rows, -1), "rope_table": np.zeros((300, 64), "float32"),
              "positions": np.zeros(rows, "int32"), "slots": np.arange(rows, dtype="int32"),
              "pages": np.zeros((2, 8, 2, 1, 16, 64), np.uint8), "layer": 0}
    run(float_kernels, float_kernels.rope_append(spec), values, {"q": (rows, 64)})
    got = values["pages"][0, :, 1, 0].reshape(-1)[:len(some)]
    np.testing.assert_array_equal(got[:-1], stored(spec, some[:-1]))
    assert got[-1] == 0x7F


def test_bad_questions_are_refused_with_the_reason() -> None:
    kernels = provider("avx2")
    with pytest.raises(CompileError, match="not a multiple of its group of 32"):
        kernels.weight_layout(FORMATS["q4_0"], 64, 100, False)
    with pytest.raises(CompileError, match="float32 activations, got float16"):
        kernels.norm(NormSpec(64, 1e-5, "float16", False))
    with pytest.raises(CompileError, match="KV dtype"):
        kernels.decode_attention(attention_spec(kv_dtype="bfloat16"))
