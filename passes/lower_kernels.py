"""LowerKernels: every `relaxpack.*` placeholder becomes calls of the kernels a provider answers with.

The provider comes from outside (schedules); this pass only translates between the graph and `kernel_spec`. Kernels that
write the pages do so in place: the pages travel through the function as a chain of results, so that no later call can
move before the append. Rows that are `t` of `prefill` get the kernels for many rows, everything else those for few.
What each kernel is (name, source, how often called) is recorded in the module attribute `relaxpack.kernels`.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import (
    AttentionSpec,
    EmbeddingSpec,
    Kernel,
    KernelProvider,
    NormSpec,
    SamplingSpec,
    Stage,
)
from relaxpack.passes.fuse_head_sample import split_operands
from relaxpack.passes.linear_call import has_many_rows, outputs_of, phase_of, read_linear
from relaxpack.passes.memory_plan import OVERWRITES
from relaxpack.passes.rewrite import FunctionRewriter, operands_of, placeholder_name
from relaxpack.passes.step_table import OPERATIONS
from relaxpack.placeholders import (
    ADD_RMS_NORM,
    DECODE_ATTENTION,
    EMBEDDING,
    HEAD_SAMPLE,
    LINEAR,
    PREFILL_ATTENTION,
    RMS_NORM,
    ROPE_APPEND_ATTENTION,
    SAMPLE,
    SPREAD_ATTENTION,
    TOP,
)
from relaxpack.weight_format import FORMATS
from tvm import relax
from tvm.relax.expr_functor import mutator

KERNELS = "relaxpack.kernels"


@mutator
class _Rewriter(FunctionRewriter):
    def __init__(self, mod: tvm.IRModule, provider: KernelProvider, attention: AttentionSpec) -> None:
        super().__init__(mod)
        self.provider, self.attention = provider, attention
        self.function_name = ""
        self.pages: Any = None
        self.global_vars: dict[str, Any] = {}
        self.calls: dict[str, Counter[tuple[str, str]]] = {}
        self.operations: dict[str, dict[str, Any]] = {}

    def _rewrite_function(self, name: str, func: relax.Function) -> relax.Function:
        self.function_name = name
        self.pages = next((v for v in func.params if v.name == "pages"), None)
        self.calls[name] = Counter()
        return super()._rewrite_function(name, func)

    def rewrite(self, call: Any) -> Any | None:
        name = placeholder_name(call)
        if name is None:
            return None
        operands = [self.new(operand) for operand in operands_of(call)]
        if name.startswith(LINEAR):
            return self._linear(call, operands)
        if name == EMBEDDING:
            return self._embedding(call, operands)
        if name in (RMS_NORM, ADD_RMS_NORM):
            return self._norm(name, call, operands)
        if name in (PREFILL_ATTENTION, DECODE_ATTENTION, ROPE_APPEND_ATTENTION, SPREAD_ATTENTION):
            return self._attention(name, call, operands)
        if name == SAMPLE:
            return self._sample(call, operands)
        if name == TOP:
            return self._top_logprobs(call, operands)
        if name.startswith(HEAD_SAMPLE):
            return self._head_sample(call, operands)
        return None

    # -- one method per operation: operands → spec and named buffers --------------------------------------------

    def _linear(self, call: Any, operands: list[Any]) -> Any:
        read = read_linear(call, operands, phase_of(self.function_name, operands[0]))
        spec = read.spec
        buffers = read.named | self._weight_buffers(spec.weight, spec.out_features, spec.in_features, spec.gated,
                                                    read.weight)
        facts = {"operation": "linear", "n": spec.out_features, "k": spec.in_features, "format": spec.weight.name}
        kernel = self.provider.linear(spec)
        if ignored := buffers.keys() - {name for stage in kernel.stages for name in stage.inputs}:
            raise CompileError(f"kernel {kernel.stages[-1].name} ignores {', '.join(sorted(ignored))} of {spec}: a bug in "
                               "the kernels of this target")
        return self._call(kernel, buffers, outputs_of(call), facts)

    def _embedding(self, call: Any, operands: list[Any]) -> Any:
        scaled = isinstance(operands[-1], tvm.tirx.FloatImm)
        factor = float(operands.pop().value) if scaled else 1.0
        token_ids, *buffers, fmt, _ = operands
        weight, hidden = FORMATS[str(fmt.value)], int(call.ty.shape[-1])
        vocab = self._vocab_size(call)
        spec = EmbeddingSpec(vocab, hidden, weight, str(call.ty.dtype), factor)
        return self._call(self.provider.embedding(spec),
                          {"token_ids": token_ids, **self._weight_buffers(weight, vocab, hidden, False, buffers)},
                          {"y": call.ty}, {"operation": "embedding", "vocab": vocab})

    def _norm(self, name: str, call: Any, operands: list[Any]) -> Any:
        *tensors, epsilon = operands
        residual = name == ADD_RMS_NORM
        x, weight = tensors[0], tensors[-1]
        spec = NormSpec(int(weight.ty.shape[0]), float(epsilon.value), str(x.ty.dtype), residual,
                        has_many_rows(self.function_name, x))
        buffers = {"x": x, "weight": weight, **({"residual": tensors[1]} if residual else {})}
        outputs = {"total": call.ty.fields[0], "y": call.ty.fields[1]} if residual else {"y": call.ty}
        return self._call(self.provider.norm(spec), buffers, outputs, {"operation": name.removeprefix("relaxpack.")})

    def _attention(self, name: str, call: Any, operands: list[Any]) -> Any:
        *tensors, layer, window = operands
        integers = ["rope_table", "positions", "slots", "page_table",
                    *(["query_start"] if name == PREFILL_ATTENTION else []), "lengths"]
        norms = ["q_norm", "k_norm"] if self.attention.qk_norm_epsilon is not None else []
        spread = name == SPREAD_ATTENTION
        buffers = dict(zip(["qkv", "pages", *integers, *norms, *["shared"] * spread], tensors, strict=True))
        buffers |= {"pages": self.pages, "layer": layer}
        buffers |= {norm: self.as_float32(buffers[norm]) for norm in norms}
        spec = replace(self.attention, window=int(window) or None)
        facts = {"heads": spec.num_heads, "head_dim": spec.head_dim, "rotary_dim": spec.rotary_dim,
                 "kv_bytes": 2 * spec.num_kv_heads * spec.head_dim * spec.kv_item_bytes}
        if name == ROPE_APPEND_ATTENTION:
            fused = self.provider.rope_append_attention(spec, int(call.ty.shape[0]))
            assert fused is not None, "FuseRopeAppendAttention asked before"
            return self._call(fused, buffers, {"y": call.ty},
                              {"operation": "rope_append_attention", "window": spec.window, **facts})
        rope = self._call(self.provider.rope_append(spec), buffers, {"q": call.ty}, {"operation": "rope_append", **facts})
        buffers["q"] = self.emit(rope)
        attend = self.provider.prefill_attention if name == PREFILL_ATTENTION else self.provider.decode_attention
        kernel = self.provider.spread_attention(spec, int(call.ty.shape[0])) if spread else attend(spec)
        assert kernel is not None, "SpreadDecode asked before"
        before = next(i for i, stage in enumerate(kernel.stages) if "lengths" in stage.inputs)
        return self._call(kernel, buffers | {"pages": self.pages}, {"y": call.ty},
                          {"operation": "attention", "window": spec.window, "before": before, **facts})

    def _sample(self, call: Any, operands: list[Any]) -> Any:
        names = ("logits", "settings", "counters", "counts", "drawn", "allowed")
        buffers = dict(zip(names, operands, strict=False))      # `allowed` only where rows may be constrained
        kernel = self.provider.sample(SamplingSpec(int(operands[0].ty.shape[1]), "allowed" in buffers))
        return self._call(kernel, buffers, {"drawn": call.ty}, {"operation": "sample"})

    def _top_logprobs(self, call: Any, operands: list[Any]) -> Any:
        ids, logprobs = call.ty.fields
        kernel = self.provider.top_logprobs(int(operands[0].ty.shape[1]))
        buffers = dict(zip(("logits", "counters"), operands, strict=True))
        return self._call(kernel, buffers, {"top_ids": ids, "top_logprobs": logprobs}, {"operation": "top_logprobs"})

    def _head_sample(self, call: Any, operands: list[Any]) -> Any:
        logits, drawn = call.ty.fields
        linear, given = split_operands(operands)
        read = read_linear(call, linear, phase_of(self.function_name, linear[0]), logits)
        spec = read.spec
        kernel = self.provider.head_sample(spec, SamplingSpec(spec.out_features))
        assert kernel is not None, "FuseHeadSample asks the same"
        weight = self._weight_buffers(spec.weight, spec.out_features, spec.in_features, False, read.weight)
        buffers = {**read.named, **weight,
                   **dict(zip(("settings", "counters", "counts", "drawn", *kernel.persistent), given, strict=True))}
        facts = {"operation": "linear", "n": spec.out_features, "k": spec.in_features, "format": spec.weight.name}
        return self._call(kernel, buffers, {"y": logits, "drawn": drawn}, facts)

    # -- plumbing -------------------------------------------------------------------------------------------------

    def _vocab_size(self, call: Any) -> int:
        table = self.recipes[operands_of(call)[1].name]
        return table.out_features  # type: ignore[union-attr]  # packed by PackWeights

    def _weight_buffers(self, weight: Any, n: int, k: int, gated: bool, buffers: list[Any]) -> dict[str, Any]:
        layout = self.provider.weight_layout(weight, n, k, gated)
        return {"weight" + (f".{suffix}" if suffix else ""): buffer
                for (suffix, _, _), buffer in zip(layout.buffers, buffers, strict=True)}

    def _call(self, kernel: Kernel, buffers: dict[str, Any], outputs: dict[str, Any], facts: dict[str, Any]) -> Any:
        """Emit the stages of a kernel; the result is the output, or a tuple of the outputs in their order. `facts` say
        what is computed, for the step table: by the stage behind `before` others, as far as its rows go."""
        buffers, facts = dict(buffers), dict(facts)
        before = facts.pop("before", 0)
        rows = (buffers["logits"].ty if "logits" in buffers else next(iter(outputs.values()))).shape[0]
        sequences = buffers["lengths"].ty.shape[0] if "lengths" in buffers else rows
        symbols = {"t": rows, "b": sequences}
        types = dict(outputs)
        for name, (shape, dtype) in kernel.temporaries.items():
            types[name] = relax.TensorType([symbols[d] if isinstance(d, str) else d for d in shape], dtype)
        for index, stage in enumerate(kernel.stages):
            self.operations[stage.name] = {**facts, "stage": index - before}
            self.calls[self.function_name][stage.name, kernel.source] += 1
            inputs = [buffers[name] for name in stage.inputs]
            out_types = [*(buffers[name].ty for name in stage.inplace), *(types[name] for name in stage.outputs)]
            gv = self._global_var(stage)
            if stage.inplace:
                indices = [*(stage.inputs.index(name) for name in stage.inplace), *([-1] * len(stage.outputs))]
                result = self.emit(relax.call_tir_inplace(gv, inputs, indices, out_types))
            else:
                result = self.emit(relax.call_tir(gv, inputs, out_types if len(out_types) > 1 else out_types[0]))
            names = [*stage.inplace, *stage.outputs]
            for i, name in enumerate(names):
                buffers[name] = result if len(names) == 1 else self.emit(relax.TupleGetItem(result, i))
            if "pages" in stage.inplace:
                self.pages = buffers["pages"]
        results = [buffers[name] for name in outputs]
        return results[0] if len(results) == 1 else relax.Tuple(results)

    def _global_var(self, stage: Stage) -> Any:
        if stage.name not in self.global_vars:
            func = stage.func.without_attr("global_symbol")
            if stage.overwrites:
                at = [*stage.inputs, *stage.outputs].index
                func = func.with_attr(OVERWRITES, [[at(old), at(new)] for old, new in stage.overwrites])
            self.global_vars[stage.name] = self.builder_.add_func(func, stage.name)
        return self.global_vars[stage.name]


def LowerKernels(provider: KernelProvider, attention: AttentionSpec) -> Any:
    """The pass. `attention` describes the model's attention; the window comes from each layer's call."""

    @tvm.transform.module_pass(opt_level=0, name="LowerKernels")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        rewriter = _Rewriter(mod, provider, attention)
        out = rewriter.run()
        calls = {function: [{"kernel": name, "source": source, "calls": count}
                            for (name, source), count in sorted(counter.items())]
                 for function, counter in sorted(rewriter.calls.items())}
        return out.with_attr(KERNELS, json.dumps(calls)).with_attr(OPERATIONS, json.dumps(rewriter.operations))

    return run
