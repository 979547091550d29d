"""Passes keep the numbers: one model compiled without our optimising passes, with each family of them, with random subsets,
and compared with the NumPy reference. Kernels are plain loops, so that no schedule is involved. And the RoPE table that
folding leaves in the module is NumPy's.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.compile.kernels import attention_spec
from relaxpack.compile.weights import ParameterMaker
from relaxpack.passes.combine_parallel_matmul import CombineParallelMatmul
from relaxpack.passes.fuse_add_norm import FuseAddNorm
from relaxpack.passes.fuse_unpack_matmul import FuseUnpackMatmul
from relaxpack.passes.lower_kernels import LowerKernels
from relaxpack.passes.memory_plan import VerifyMemoryPlan
from relaxpack.passes.pack_weights import PackWeights
from relaxpack.passes.prune_parameters import PruneParameters
from relaxpack.passes.rewrite import exported_functions, num_inputs, operands_of, placeholder_name, recipes_of
from relaxpack.passes.schedule_rest import DropUnusedKernels, ScheduleRest
from relaxpack.recipe import FromCheckpoint
from relaxpack.relax_models.checkpoint import Checkpoint, open_checkpoint
from relaxpack.relax_models.export import BuildLimits, export_model
from relaxpack.relax_models.rope import RopeConfig, inv_freq
from relaxpack.runtime.model_runner import CpuModelRunner
from relaxpack.weight_format import FORMATS
from tests.helpers.jit_model import jit_runner
from tests.helpers.numerics import decode_logits, prefill_logits, tapes
from tests.helpers.plain_kernels import PlainKernels
from tests.helpers.tiny_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.reference.numpy_decoder import forward
from tvm import relax

LIMITS = BuildLimits(max_context=64, max_batch=2, prefill_chunk=32, page_size=8)
OPTIONAL = ("combine", "pack and fuse", "add + norm", "TVM's fusion")
TOLERANCE = 2e-5  # float32, plain loops in both; only the order of sums inside TVM's matmul differs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_checkpoint(tmp_path_factory.mktemp("m") / "m", "llama_bias", num_hidden_layers=2))


def compiled(checkpoint: Checkpoint, chosen: tuple[str, ...]) -> CpuModelRunner:
    """The model with the chosen optional passes; the others are left out of the pipeline."""
    config, provider = checkpoint.config, PlainKernels()
    formats = {name: FORMATS["f32"] for name, info in checkpoint.tensors.items() if len(info.shape) == 2}
    transform = relax.transform
    passes = [
        transform.FoldConstant(),
        *([CombineParallelMatmul(formats)] if "combine" in chosen else []),
        *([PackWeights(provider, formats), FuseUnpackMatmul] if "pack and fuse" in chosen else []),
        *([FuseAddNorm] if "add + norm" in chosen else []),
        LowerKernels(provider, attention_spec(config, LIMITS, "float32", "float32")), PruneParameters,
        transform.LegalizeOps(), transform.AnnotateTIROpPattern(), transform.FoldConstant(),
        *([transform.FuseOps(), transform.FuseTIR()] if "TVM's fusion" in chosen else []),
        ScheduleRest(None), DropUnusedKernels]
    finalize = [
        transform.BundleModelParams("params"), transform.RewriteDataflowReshape(), transform.ToNonDataflow(),
        transform.RemovePurityChecking(), transform.CallTIRRewrite(), transform.StaticPlanBlockMemory(),
        VerifyMemoryPlan, transform.LowerAllocTensor(), transform.KillAfterLastUse(), transform.LowerRuntimeBuiltin(),
        transform.ComputePrimValue(), transform.VMShapeLower(), transform.AttachGlobalSymbol()]
    target = tvm.target.Target("llvm")
    with target:
        lowered = tvm.transform.Sequential(passes)(export_model(config, LIMITS, "float32", "float32"))
        final = tvm.transform.Sequential(finalize)(lowered)
        executable = tvm.compile(final, target, relax_pipeline=None)
    recipes, (_, func) = recipes_of(lowered), next(exported_functions(lowered))
    maker = ParameterMaker(checkpoint, provider)
    parameters = [maker.make(recipes.get(p.name, FromCheckpoint(p.name)), str(p.ty.dtype))
                  for p in func.params[num_inputs(func):]]
    return jit_runner(config, LIMITS, executable, parameters)


def logits(runner: CpuModelRunner, ids: list[int]) -> np.ndarray:
    (tape,) = tapes(runner, [ids])
    return np.concatenate([prefill_logits(tape, 32), decode_logits(tape, len(ids))])


IDS = np.random.default_rng(4).integers(0, VOCAB_SIZE, 40).tolist()


@pytest.fixture(scope="module")
def plain(checkpoint: Checkpoint) -> np.ndarray:
    """Logits without any optional pass: standard Relax operations through TVM's own legalisation."""
    return logits(compiled(checkpoint, ()), IDS)


def test_without_any_pass(checkpoint: Checkpoint, plain: np.ndarray) -> None:
    np.testing.assert_allclose(plain, forward(checkpoint, IDS, LIMITS.max_context), rtol=0, atol=2e-4)


@pytest.mark.parametrize("chosen", OPTIONAL)
def test_each_family(checkpoint: Checkpoint, plain: np.ndarray, chosen: str) -> None:
    np.testing.assert_allclose(logits(compiled(checkpoint, (chosen,)), IDS), plain, rtol=0, atol=TOLERANCE)


SUBSETS = [s for n in (2, 3, 4) for s in itertools.combinations(OPTIONAL, n)]


@pytest.mark.parametrize("chosen", [SUBSETS[-1], *random.Random(7).sample(SUBSETS[:-1], 4)], ids=" & ".join)
def test_subsets(checkpoint: Checkpoint, plain: np.ndarray, chosen: tuple[str, ...]) -> None:
    np.testing.assert_allclose(logits(compiled(checkpoint, chosen), IDS), plain, rtol=0, atol=TOLERANCE)


ROPES = {
    "default": RopeConfig("default", 10000.0, 16, 512),
    "part of a head": RopeConfig("default", 10000.0, 8, 512),
    "linear": RopeConfig("linear", 10000.0, 16, 512, factor=4.0),
    "dynamic": RopeConfig("dynamic", 10000.0, 16, 128, factor=2.0),
    "llama3": RopeConfig("llama3", 500000.0, 16, 512, factor=8.0, original_max_position=128),
    "yarn": RopeConfig("yarn", 10000.0, 16, 512, factor=4.0, original_max_position=128),
    "longrope": RopeConfig("longrope", 10000.0, 16, 512, factor=4.0, original_max_position=128,
                           short_factors=(1.0,) * 8, long_factors=tuple(1 + i / 2 for i in range(8))),
}


@pytest.mark.parametrize("kind", ROPES)
def test_the_folded_rope_table_is_numpys(checkpoint: Checkpoint, kind: str) -> None:
    rope = ROPES[kind]
    config = replace(checkpoint.config, rope=rope, num_layers=1, layer_windows=(None,), max_position=512)
    mod = export_model(config, replace(LIMITS, max_context=512), "float32", "float32")
    with tvm.target.Target("llvm"):
        mod = relax.transform.FoldConstant()(mod)
    frequencies, factor = inv_freq(rope, 512)
    angles = np.arange(512, dtype=np.float32)[:, None] * frequencies
    expected = np.concatenate([np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))], 1) * factor
    found = 0
    for _, func in exported_functions(mod):
        for binding in func.body.blocks[0].bindings:
            if (placeholder_name(binding.value) or "").endswith("_attention"):
                table = operands_of(binding.value)[2].value.numpy()
                assert table.dtype == np.float32
                np.testing.assert_allclose(table, expected, rtol=0, atol=2e-7 * max(1.0, factor))
                found += 1
    assert found == 2  # prefill and decode
