"""Config → IRModule with the exported functions `prefill` and `decode` over symbolic shapes. The export spec stands
here once for all families; see docs/architecture.md, "Step functions".
"""

from __future__ import annotations

from dataclasses import dataclass

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.relax_models import ops
from relaxpack.relax_models.config import ModelConfig
from relaxpack.relax_models.decoder import Decoder, StepInputs
from relaxpack.relax_models.rope import inv_freq
from tvm import relax


@dataclass(frozen=True)
class BuildLimits:
    """Upper bounds the functions are planned for."""

    max_context: int
    max_batch: int = 8
    prefill_chunk: int = 512
    page_size: int = 16

    @property
    def max_pages(self) -> int:
        return -(-self.max_context // self.page_size)


def export_model(config: ModelConfig, limits: BuildLimits, dtype: str, kv_dtype: str) -> tvm.IRModule:
    """The module of float weights: parameters after `num_input` are named as in the checkpoint and have `dtype`."""
    builder = relax.BlockBuilder()
    for name in ("prefill", "decode"):
        _export_function(builder, name, config, limits, dtype, kv_dtype)
    return builder.get()


def _export_function(builder: relax.BlockBuilder, name: str, config: ModelConfig, limits: BuildLimits, dtype: str,
                     kv_dtype: str) -> None:
    c, is_prefill = config, name == "prefill"
    t, b, r, p = (tvm.tirx.Var(n, "int64") for n in "tbrp")
    sequences = b if is_prefill else t

    def i32(name: str, *shape: object) -> relax.Var:
        return relax.Var(name, relax.TensorType(list(shape), "int32"))

    token_ids, positions, slots = i32("token_ids", t), i32("positions", t), i32("slots", t)
    query_start = i32("query_start", b + 1)
    lengths, page_table = i32("lengths", sequences), i32("page_table", sequences, limits.max_pages)
    logit_rows = i32("logit_rows", r)
    pages = relax.Var("pages", relax.TensorType(
        [c.num_layers, p, 2, c.num_kv_heads, limits.page_size, c.head_dim], kv_dtype))
    inputs = [token_ids, positions, slots, *([query_start] if is_prefill else []), lengths, page_table,
              *([logit_rows] if is_prefill else []), pages]

    bounds = {"t": limits.prefill_chunk if is_prefill else limits.max_batch,
              **({"b": limits.max_batch, "r": limits.prefill_chunk} if is_prefill else {})}
    attrs = {"num_input": len(inputs), "tir_var_upper_bound": bounds}
    decoder = Decoder(config, dtype)
    with builder.function(name, attrs=attrs):
        with builder.dataflow():
            logits = _emit(builder, decoder, config, limits, {v.name: v for v in inputs})
            out = builder.emit_output(logits)
        builder.emit_func_output(out, [*inputs, *decoder.parameters.values()])


def _emit(builder: relax.BlockBuilder, decoder: Decoder, config: ModelConfig, limits: BuildLimits,
          inputs: dict[str, relax.Var]) -> ops.Expr:
    graph = ops.Graph(builder)
    frequencies, factor = inv_freq(config.rope, limits.max_context)
    table = ops.rope_table(graph, frequencies, limits.max_context, factor)
    is_prefill = "query_start" in inputs
    integers = [table, inputs["positions"], inputs["slots"], inputs["page_table"],
                *([inputs["query_start"]] if is_prefill else []), inputs["lengths"]]
    name = ops.PREFILL_ATTENTION if is_prefill else ops.DECODE_ATTENTION
    step = StepInputs(inputs["token_ids"], inputs["pages"], integers, name, inputs.get("logit_rows"))
    return decoder(graph, step)
