"""The chains of layers in which decode kernels are judged: models of few layers, lowered as for a build. Runs where TVM's
compiler is, without code generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from benchmarks.gpu.models import MODELS, OneFormat
from relaxpack.compile.kernels import attention_spec
from relaxpack.passes.config import PipelineConfig
from relaxpack.passes.pipeline import phases, run_phases
from relaxpack.relax_models.export import BuildLimits, export_model
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.schedules.rest import rest_rule
from relaxpack.target import TargetSpec
from relaxpack.tuning.candidates import families_for
from relaxpack.tuning.chain import LEAST_LAYERS, Chain
from relaxpack.tuning.layer_chain import layer_chain
from relaxpack.tuning.tasks import asked

NAMES = {"1b": "llama-3.2-1b", "3b": "llama-3.2-3b", "8b": "llama-3.1-8b", "7b": "qwen2.5-7b", "q3": "qwen3-8b",
         "phi": "phi-4"}


def layer_chains(model: str, weight: str, rows: Iterable[int], target: TargetSpec) -> dict[int, Chain]:
    """By number of rows; `model` is a key of NAMES. The build has buckets of just these rows and the rules' kernels."""
    buckets = tuple(sorted(rows))
    config = replace(MODELS[NAMES[model]], num_layers=LEAST_LAYERS + 1, layer_windows=(None,) * (LEAST_LAYERS + 1))
    limits, provider = BuildLimits(4096, max(buckets), 512), CudaKernels(target)
    attention = attention_spec(config, limits, "bfloat16", "bfloat16")
    module = export_model(config, limits, "bfloat16", "bfloat16", True)
    until = [phase for phase in phases(provider, attention, OneFormat(weight), PipelineConfig(
        decode_buckets=buckets, cuda_graph=True), rest_rule(target)) if phase[0] != "finalize"]
    module = run_phases(module, target.to_tvm(), until)
    found = {rows: layer_chain(module, rows, asked(provider), families_for(target)) for rows in buckets}
    return {rows: chain for rows, chain in found.items() if chain is not None}
