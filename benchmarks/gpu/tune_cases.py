"""What a candidate is checked and timed on, on the GPU machine: sets of buffers that together exceed the L2 cache, what must
come out in float64, and the same work by torch. Needs TVM's runtime and torch, no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu.matmul_bench import TOLERANCE, copies_to_rotate

Buffers = dict[str, Any]                 # name of a buffer in the contract of kernel_spec → tensor, or the layer's number
FEW_ROWS = 256                           # above, a matmul is bound by arithmetic and two copies of a weight are enough
ATTENTION_BYTES = 400 << 20              # keys and values that are walked over


class Case:
    """`sets`: one for each call of a round. `rotated_bytes`: of what differs between them; the others: of a call."""

    kind = ""
    tolerance = 4e-3

    def __init__(self, bench: Any, given: dict[str, Any], unpack: Callable[..., None] | None = None) -> None:
        self.bench, self.torch, self.given = bench, bench.torch, given
        self.sets: list[Buffers] = []
        self.read_bytes, self.flops, self.rotated_bytes = 0.0, 0.0, 0
        self.outputs: tuple[str, ...] = ("y",)

    def poisoned(self, shape: Sequence[int], dtype: str) -> Any:
        if dtype == "int32":
            return self.torch.full(tuple(shape), -123456789, dtype=self.torch.int32, device=self.bench.device)
        return self.torch.full(tuple(shape), math.nan, dtype=getattr(self.torch, dtype), device=self.bench.device)

    def reference(self) -> dict[str, Any]:
        """float64 of each output for the first set."""
        raise NotImplementedError

    def peer(self) -> list[Callable[[], object]]:
        """The same work by torch, over the same amount of data."""
        raise NotImplementedError

    def poison(self) -> None:
        for name in self.outputs:
            self.sets[0][name].fill_(math.nan)

    def errors(self, expected: dict[str, Any]) -> float:
        """The largest relative error; NaN counts as infinite."""
        worst = 0.0
        for name, reference in expected.items():
            got = self.sets[0][name].double()
            error = float((got - reference).norm() / reference.norm().clamp_min(1e-30))
            worst = max(worst, error if math.isfinite(error) else math.inf)
        return worst


class LinearCase(Case):
    kind = "linear"

    def __init__(self, bench: Any, given: dict[str, Any], unpack: Callable[..., None] | None = None) -> None:
        from relaxpack.weight_format import FORMATS

        super().__init__(bench, given)
        rows, n, k = (given[name] for name in ("rows", "n", "k"))
        fmt = FORMATS[given["weight"]]
        one = int(n * k * fmt.bytes_per_weight())
        count = copies_to_rotate(one) if rows <= FEW_ROWS else 2
        self.tolerance = TOLERANCE[given["out_dtype"]]
        self.width = n // 2 if given["swiglu"] else n
        self.plain, weights = self._weights(fmt, n, k, count, unpack)
        shared = {"x": bench.random((rows, k), "bfloat16"), "y": self.poisoned((rows, self.width), given["out_dtype"])}
        if given["bias"]:
            shared["bias"] = bench.random((n,), "float32")
        if given.get("prepares_norm"):
            shared |= {"residual": bench.random((rows, n), "bfloat16"), "norm_weight": bench.random((n,), "float32"),
                       "scaled": self.poisoned((rows, n), "bfloat16"), "squares": self.poisoned((rows, n // 16), "float32")}
            self.outputs = ("y", "scaled", "squares")
        if given.get("norm_epsilon") is not None:
            shared["squares"] = bench.random((rows, k // 16), "float32").square() * 16
        self.sets = [{**shared, **weight} for weight in weights]
        self.read_bytes, self.flops = one + 2 * rows * k + shared["y"].nbytes, 2.0 * rows * n * k
        self.rotated_bytes = one * count

    def _weights(self, fmt: Any, n: int, k: int, count: int,
                 unpack: Callable[..., None] | None) -> tuple[Any, list[Buffers]]:
        """(the first one as plain numbers, exact in bfloat16, all of them). A weight of a model serves several tasks in a
        row, so it stays on the device until another one comes."""
        held, key = self.bench.weights, (fmt.name, n, k)
        if key not in held or len(held[key][1]) < count:
            held.clear()
            if not fmt.quantized:
                first = self.bench.random((n, k), "bfloat16", k ** -0.5)
                held[key] = first, [{"weight": first if i == 0 else first.clone()} for i in range(count)]
            else:
                sets = [self._packed(fmt, n, k) for _ in range(count)]
                plain = self.poisoned((n, k), "bfloat16")
                assert unpack is not None
                unpack({**sets[0], "plain": plain})
                held[key] = plain, sets
        plain, weights = held[key]
        return plain, weights[:count]

    def _packed(self, fmt: Any, n: int, k: int) -> Buffers:
        """Random codes; scales are powers of two, so that every weight is exact in bfloat16."""
        from relaxpack.schedules.kernels.cuda.packing import weight_layout

        torch, device, found = self.torch, self.bench.device, {}
        for suffix, shape, dtype in weight_layout(fmt, n, k, self.given["swiglu"]).buffers:
            if suffix == "codes":
                codes = torch.randint(0, 256, (4 * math.prod(shape),), device=device, dtype=torch.uint8,
                                      generator=self.bench.generator)
                if fmt.e4m3:             # no NaN
                    codes = torch.where(codes & 0x7F == 0x7F, codes ^ 1, codes)
                found["weight.codes"] = codes.view(torch.int32).view(torch.uint32).reshape(shape)
            elif suffix == "scales":
                powers = torch.randint(6, 9, shape, device=device, generator=self.bench.generator)
                scales = torch.pow(2.0, -powers.float())
                if fmt.zeros:            # words of a scale and a zero, here 8
                    words = scales.half().view(torch.int16).int() | 8 << 16
                    found["weight.scales"] = words.view(torch.uint32)
                else:
                    found["weight.scales"] = scales.to(getattr(torch, dtype))
            else:
                found[f"weight.{suffix}"] = torch.full(shape, -(2.0 ** -5), device=device, dtype=getattr(torch, dtype))
        return found

    def reference(self) -> dict[str, Any]:
        one = self.sets[0]
        z = one["x"].double() @ self.plain.double().T
        if self.given.get("norm_epsilon") is not None:
            mean = one["squares"].double().sum(-1, keepdim=True) / self.given["k"]
            z = z / (mean + self.given["norm_epsilon"]).sqrt()
        if "bias" in one:
            z = z + one["bias"].double()
        if self.given.get("prepares_norm"):
            y = z + one["residual"].double()
            return {"y": y, "scaled": y * one["norm_weight"].double(),
                    "squares": y.reshape(len(y), -1, 16).square().sum(-1)}
        if self.given["swiglu"]:         # packed rows are blocks of 8 gate rows and their 8 up rows
            pairs = z.reshape(len(z), -1, 2, 8)
            gate, up = (pairs[:, :, i].reshape(len(z), self.width) for i in (0, 1))
            z = gate * self.torch.sigmoid(gate) * up
        return {"y": z}

    def peer(self) -> list[Callable[[], object]]:
        """cuBLAS on bfloat16 weights: the bare product, without SwiGLU."""
        linear, x = self.torch.nn.functional.linear, self.sets[0]["x"]
        weights = [one["weight"] for one in self.sets if "weight" in one]
        if not weights:
            weights = [self.plain.clone() for _ in range(copies_to_rotate(self.plain.nbytes))]
        return [lambda w=w: linear(x, w) for w in weights]


class NormCase(Case):
    """A hidden state is small: it stays in the L2 cache, as it does in a step."""

    kind = "norm"

    def __init__(self, bench: Any, given: dict[str, Any], unpack: Callable[..., None] | None = None) -> None:
        super().__init__(bench, given)
        shape = (given["rows"], given["h"])
        weight = bench.random((given["h"],), "float32")
        copies = max(2, min(20, (64 << 20) // (math.prod(shape) * 2)))
        for _ in range(copies):
            one = {"x": bench.random(shape, "bfloat16", 3.0), "weight": weight, "y": self.poisoned(shape, "bfloat16")}
            if given["residual"]:
                one |= {"residual": bench.random(shape, "bfloat16"), "total": self.poisoned(shape, "bfloat16")}
            self.sets.append(one)
        self.outputs = ("total", "y") if given["residual"] else ("y",)
        self.read_bytes = math.prod(shape) * 2 * len([name for name in self.sets[0] if name != "weight"])
        self.rotated_bytes = int(self.read_bytes * copies)

    def reference(self) -> dict[str, Any]:
        one = self.sets[0]
        total = one["x"] + one["residual"] if "residual" in one else one["x"]
        wide = total.double()
        y = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * one["weight"].double()
        return {"total": wide, "y": y} if "residual" in one else {"y": y}

    def peer(self) -> list[Callable[[], object]]:
        rms_norm, h = self.torch.nn.functional.rms_norm, self.given["h"]

        def call(one: Buffers, weight: Any) -> object:
            x = one["x"] + one["residual"] if "residual" in one else one["x"]
            return rms_norm(x, (h,), weight, 1e-5)

        weight = self.sets[0]["weight"].to(self.torch.bfloat16)
        return [lambda one=one: call(one, weight) for one in self.sets]


class DecodeAttentionCase(Case):
    kind = "decode_attention"

    def __init__(self, bench: Any, given: dict[str, Any], unpack: Callable[..., None] | None = None) -> None:
        super().__init__(bench, given)
        spec, rows, tokens = given["spec"], given["rows"], given["tokens"]
        self.read_bytes = 4.0 * rows * tokens * spec["num_kv_heads"] * spec["head_dim"]
        self.layers = max(2, min(64, math.ceil(ATTENTION_BYTES / self.read_bytes) // 2 * 2))
        self.flops = 4.0 * rows * tokens * spec["num_heads"] * spec["head_dim"]
        self.rotated_bytes = int(self.read_bytes * self.layers)
        self.place(spec, [tokens] * rows)

    def place(self, spec: dict[str, Any], lengths: list[int]) -> None:
        from tests.helpers.attention_device import PagedCase

        self.held = PagedCase(spec, lengths, layers=self.layers)
        self.sets = [self.held.buffers(layer) for layer in range(self.layers)]

    def reference(self) -> dict[str, Any]:
        return {"y": self.held.reference(0)}

    def peer(self) -> list[Callable[[], object]]:
        """Scaled dot product attention of torch, on keys and values in one piece."""
        torch, spec, rows, tokens = self.torch, self.given["spec"], self.given["rows"], self.given["tokens"]
        attend = torch.nn.functional.scaled_dot_product_attention
        q = self.held.q.reshape(rows, spec["num_heads"], 1, spec["head_dim"])
        found = [self.bench.random((2, rows, spec["num_kv_heads"], tokens, spec["head_dim"]), "bfloat16")
                 for _ in range(max(2, min(self.layers, math.ceil((200 << 20) / self.read_bytes))))]
        return [lambda kv=kv: attend(q, kv[0], kv[1], enable_gqa=True) for kv in found]


class FusedAttentionCase(DecodeAttentionCase):
    """RoPE, append and attention: the new keys and values come out of `qkv`, and the kernel writes them to the pages. The
    first set is the one for the numbers: its pages lack the new token."""

    kind = "fused_attention"

    def place(self, spec: dict[str, Any], lengths: list[int]) -> None:
        from tests.helpers.attention_device import DecodeStep

        checked, timed = DecodeStep(spec, lengths), DecodeStep(spec, lengths, layers=self.layers)
        self.held = checked.case
        self.sets = [checked.buffers(0), *(timed.buffers(layer) for layer in range(self.layers))]


CASES: dict[str, type[Case]] = {case.kind: case for case in (LinearCase, NormCase, DecodeAttentionCase,
                                                             FusedAttentionCase)}
