"""A decode step of Llama-3.2-1B and of Gemma-2B for sm_90a, two layers each, as far as no GPU is needed: every kernel is
ours, none could run beside another, and little more than weights, keys and values, and logits is moved. No code is
generated; docs/passes.md has the whole models.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.compile.kernels import attention_spec, kernel_provider
from relaxpack.passes.config import PipelineConfig
from relaxpack.passes.pipeline import phases, run_phases
from relaxpack.passes.step_table import step_table
from relaxpack.relax_models.config import ModelConfig
from relaxpack.relax_models.export import BuildLimits, export_model
from relaxpack.schedules.rest import SOURCE, rest_rule
from relaxpack.step_costs import floor_bytes
from relaxpack.target import parse_target
from tests.helpers.model_shapes import GEMMA_2B, SHAPES, formats_of


@pytest.mark.parametrize("model", [SHAPES["Llama-3.2-1B"], GEMMA_2B], ids=["llama", "gemma"])
def test_a_step_for_sm_90a(model: ModelConfig) -> None:
    config = replace(model, num_layers=2, layer_windows=(None,) * 2)
    target, limits = parse_target("cuda:sm_90a"), BuildLimits(2048, max_batch=2, prefill_chunk=16)
    all_phases = phases(kernel_provider(target), attention_spec(config, limits, "bfloat16", "bfloat16"),
                        formats_of(config, "bf16", "bf16"),
                        PipelineConfig(decode_buckets=(1, 2), cuda_graph=True, spread_buckets=(1, 2),
                                       enabled=frozenset({"SpreadDecode"})), rest_rule(target))
    exported = export_model(config, limits, "bfloat16", "bfloat16", device_sampling=True)
    mod = tvm.IRModule({gv: f for gv, f in exported.functions_items()
                        if gv.name_hint not in ("prefill", "sample", "top_logprobs")})
    lowered = run_phases(mod, target.to_tvm(), all_phases[:-1])
    table = step_table(lowered)
    assert set(table) == {"decode", "decode_1", "decode_2", "decode_spread_1", "decode_spread_2"}
    parts = {name: [c["kernel"].rpartition("_")[2] for c in table[name]] for name in table}
    assert parts["decode_spread_1"].count("split") == 2 and "prefix" not in parts["decode_spread_1"]   # nothing to share
    assert parts["decode_spread_2"].count("split") == parts["decode_spread_2"].count("prefix") == 2
    calls = table["decode_1"]
    moved = sum(c["weight_bytes"] + c["row_bytes"] + 1024 * c["context_bytes"] for c in calls)
    assert floor_bytes(calls, 1, 1024) <= moved <= 1.03 * floor_bytes(calls, 1, 1024)
    assert max(c["depth"] for c in calls) == len(calls)
    rest = {gv.name_hint: str(f.attrs[SOURCE]) for gv, f in lowered.functions_items()
            if isinstance(f, tvm.tirx.PrimFunc) and f.attrs and SOURCE in f.attrs}
    assert set(rest.values()) == {"rule:cuda.elementwise"} and "next_token_ids" in rest and "multiply" not in rest, rest
