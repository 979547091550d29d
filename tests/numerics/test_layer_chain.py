"""Chains of whole layers, by which kernels of decode steps are judged: the calls of a build in their order, values of the
types that the kernels want, and the sums of a decoder layer when they run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.compile.kernels import attention_spec
from relaxpack.errors import TuningError
from relaxpack.kernel_spec import LinearSpec
from relaxpack.passes.config import PipelineConfig
from relaxpack.passes.pipeline import phases, run_phases
from relaxpack.relax_models.config import ModelConfig
from relaxpack.relax_models.export import BuildLimits, export_model
from relaxpack.relax_models.rope import RopeConfig
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.target import parse_target
from relaxpack.tuning.candidates import families_for, prim_func
from relaxpack.tuning.chain import Chain, ChainCall
from relaxpack.tuning.cuda_chain import PlacedChain, Weights, time_chains
from relaxpack.tuning.cuda_stages import Stages, described
from relaxpack.tuning.layer_chain import layer_chain
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning.tasks import asked
from relaxpack.weight_format import FORMATS
from tests.helpers import gpu_stand_in
from tests.helpers.cuda_harness import can_generate
from tests.helpers.gpu_stand_in import StandInGpu

pytestmark = pytest.mark.skipif(not can_generate(), reason="no CUDA code generator")
HOPPER = parse_target("cuda:sm_90a")
CONFIG = ModelConfig("llama", 256, 512, 4, 4, 2, 64, 512, 1e-5, 4096, RopeConfig("default", 10000.0, 64, 4096), (None,) * 4,
                     True, False, False, False, False)
RULE: dict[str, Any] = {"kind": "parameters", "parameters": {}}
ROWS = (2, 16, 520)          # norms inside of matmuls; kernels of their own; attention in two kernels


class _All(dict[str, Any]):
    def __init__(self, weight: str) -> None:
        self.weight = FORMATS[weight]

    def __missing__(self, name: str) -> Any:
        return self.weight


def _chains(weight: str, rows: tuple[int, ...], config: ModelConfig = CONFIG) -> dict[int, Chain | None]:
    limits, provider = BuildLimits(1024, max(rows), 16), CudaKernels(HOPPER)
    attention = attention_spec(config, limits, "bfloat16", "bfloat16")
    module = export_model(config, limits, "bfloat16", "bfloat16", True)
    pipeline = PipelineConfig(decode_buckets=rows, cuda_graph=True)
    until = [phase for phase in phases(provider, attention, _All(weight), pipeline) if phase[0] != "finalize"]
    module = run_phases(module, HOPPER.to_tvm(), until)
    return {rows: layer_chain(module, rows, asked(provider), families_for(HOPPER)) for rows in (*rows, max(rows) + 1)}


@pytest.fixture(scope="module")
def chains() -> dict[int, Chain]:
    found = _chains("bf16", ROWS)
    assert found.pop(max(ROWS) + 1) is None                     # no function of so many rows
    return {rows: chain for rows, chain in found.items() if chain is not None}


def _role(call: ChainCall) -> str:
    family, spec = family_and_spec(call.work)
    if not isinstance(spec, LinearSpec):
        return family.removeprefix("cuda.")
    return {(512, 256): "qkv", (256, 256): "o", (1024, 256): "gate_up", (256, 512): "down"}[
        spec.out_features, spec.in_features]


def test_a_layer_is_what_a_build_has_in_it(chains: dict[int, Chain]) -> None:
    assert set(chains) == set(ROWS)
    fused, own = "rope_append_attention", ["rope_append", "decode_attention"]
    wanted = {2: [fused, "o", "gate_up", "down", "qkv"], 16: [fused, "o", "norm", "gate_up", "down", "norm", "qkv"],
              520: [*own, "o", "norm", "gate_up", "down", "norm", "qkv"]}
    for rows, chain in chains.items():
        assert chain.layers == 3                                # the last of four is followed by the head
        assert [_role(call) for call in chain.calls] == wanted[rows] * 3
        assert [call.layer for call in chain.calls] == sorted(call.layer for call in chain.calls)
        norms = [work for work in chain.works().values() if family_and_spec(work)[0] == "cuda.norm"]
        assert [chain.calls_of(work.hash) for work in norms] == [2] * len(norms)
        assert Chain.from_json(json.loads(json.dumps(chain.to_json()))) == chain


def test_every_call_reads_what_the_one_before_has_written(chains: dict[int, Chain]) -> None:
    for chain in chains.values():
        for before, call in zip(chain.calls, chain.calls[1:], strict=False):
            written = {value for name, value in before.buffers if name in ("y", "scaled", "q")}
            assert written & {value for name, value in call.buffers if name in ("x", "qkv", "q")}, call
        weights = [value for call in chain.calls for name, value in call.buffers if name.startswith("weight")]
        assert len(set(weights)) == len(weights)                # each has its own
        for shared in ("pages", "lengths", "slots"):
            assert len({value for call in chain.calls for name, value in call.buffers if name == shared}) == 1


def _place(chain: Chain, rotate: int = 0, weights: Weights | None = None) -> PlacedChain:
    return PlacedChain(StandInGpu(lambda name: gpu_stand_in.wrong, lambda name: 1.0), chain, 3, rotate, weights or Weights())


@pytest.mark.parametrize("rows", ROWS)
def test_values_have_the_types_of_the_kernels(chains: dict[int, Chain], rows: int) -> None:
    """Of every buffer of every stage that the rule's kernels have, as compiled."""
    placed = _place(chains[rows])
    _check_types(placed)


@pytest.mark.slow
def test_so_do_quantised_weights() -> None:
    chain = _chains("q4_1", (16,))[16]
    assert chain is not None
    _check_types(_place(chain))


def _check_types(placed: PlacedChain) -> None:
    seen = 0
    for call in placed.calls[:len(placed.calls) // placed.layers + 1]:
        kernel, buffers = prim_func(call.work, RULE, HOPPER), dict(call.buffers)
        for stage in kernel.stages:
            for name, parameter in zip((*stage.inputs, *stage.outputs), stage.func.params, strict=True):
                if name == "layer" or name in kernel.temporaries:
                    continue
                held = placed.values[buffers[name]]
                shape = [int(dim) if isinstance(dim, tvm.tirx.IntImm) else str(dim) for dim in parameter.ty.shape]
                fits = [have if want == "p" else placed.rows if want in ("t", "b") else want
                        for want, have in zip(shape, held.shape, strict=True)]
                assert (list(held.shape), held.dtype.name) == (fits, str(parameter.ty.dtype)), (call.work.name, name)
                seen += 1
    assert seen > 20


@pytest.mark.slow
def test_weights_stay_for_another_number_of_rows(chains: dict[int, Chain]) -> None:
    weights = Weights()
    first, second = (_place(chains[rows], weights=weights) for rows in (2, 16))

    def held(placed: PlacedChain) -> set[int]:
        return {id(placed.values[value]) for call in placed.calls for name, value in call.buffers
                if name == "weight" and "norm" not in call.work.name}

    assert held(first) & held(second) and len(held(first)) == 12
    assert held(first) == held(second)
    other = _chains("bf16", (2,), replace(CONFIG, intermediate_size=768))[2]
    assert other is not None
    assert not held(_place(other, weights=weights)) & held(first)


def _kernels(chain: Chain, gpu: StandInGpu) -> dict[str, Stages]:
    """Those of the rule, with functions of the stand-in."""
    found = {}
    for key, work in chain.works().items():
        told = described(prim_func(work, RULE, HOPPER))
        functions = {stage["function"]: gpu._function(stage["function"], stage["arguments"]) for stage in told["stages"]}
        found[key] = Stages(gpu, functions.__getitem__, told)
    return found


def _numpy_kernel(name: str) -> gpu_stand_in.Kernel:
    if "attention" in name:
        return gpu_stand_in.fused_attention
    return gpu_stand_in.norm if "rms_norm" in name else gpu_stand_in.linear


@pytest.mark.parametrize("rows", [2, 16])
def test_what_comes_out_is_what_decoder_layers_give(chains: dict[int, Chain], rows: int) -> None:
    chain, gpu = chains[rows], StandInGpu(_numpy_kernel, lambda name: 2.0)
    placed = PlacedChain(gpu, chain, 3, 0, Weights())
    given = {value: placed.values[value].astype(np.float64) for call in chain.calls for name, value in call.buffers
             if placed.values[value].dtype == ml_dtypes.bfloat16 or placed.values[value].dtype == np.float32}
    one, = time_chains(gpu, placed, [_kernels(chain, gpu)], 5, 10.0)
    per_layer = len(chain.calls) // chain.layers
    assert len(one.times_us) == 5 and np.allclose(one.times_us, 2.0 * per_layer, rtol=0.01) and one.difference == 0

    def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight

    layers = [chain.calls[i:i + per_layer] for i in range(0, len(chain.calls), per_layer)]
    qkv = given[dict(layers[0][0].buffers)["qkv"]]
    total = given[next(value for call in layers[0] for name, value in call.buffers if name == "residual")]
    for layer in layers:
        of = {_role(call): given[dict(call.buffers)["weight"]] for call in layer if _role(call) not in (
            "rope_append_attention", "norm")}
        norms = [given[value] for call in layer for name, value in call.buffers
                 if name == "norm_weight" or (name == "weight" and _role(call) == "norm")]
        total = total + qkv[:, :256] / 2 @ of["o"].T
        both = normed(total, norms[0]) @ of["gate_up"].T
        gate, up = np.moveaxis(both.reshape(rows, -1, 2, 8), 2, 0).reshape(2, rows, -1)
        total = total + gate / (1 + np.exp(-gate)) * up @ of["down"].T
        qkv = normed(total, norms[1]) @ of["qkv"].T
    assert np.linalg.norm(placed.result() - qkv) < 0.02 * np.linalg.norm(qkv)


def test_another_result_takes_forever(chains: dict[int, Chain]) -> None:
    """A kernel that is right alone and not in a chain cannot win, even where it leaves what another one has written; without
    numbers of the rule's nothing is said."""
    def nothing(**buffers: Any) -> None:
        pass

    chain = chains[2]
    good = StandInGpu(_numpy_kernel, lambda name: 2.0)
    bad = StandInGpu(lambda name: gpu_stand_in.wrong if "swiglu" in name else _numpy_kernel(name), lambda name: 1.0)
    lazy = StandInGpu(lambda name: nothing if "swiglu" in name else _numpy_kernel(name), lambda name: 1.0)
    placed = PlacedChain(good, chain, 3, 0, Weights())
    first, *others = time_chains(good, placed, [_kernels(chain, gpu) for gpu in (good, bad, lazy)], 8, 10.0)
    assert max(first.times_us) < 100 and [set(one.times_us) for one in others] == [{float("inf")}] * 2
    assert 0.1 < others[0].difference < 2 and others[1].difference == float("inf")

    def poisons(**buffers: Any) -> None:
        buffers["y"][...] = np.nan

    broken = StandInGpu(lambda name: poisons, lambda name: 1.0)
    with pytest.raises(TuningError, match="not finite"):
        time_chains(good, placed, [_kernels(chain, broken)], 8, 10.0)


def test_small_layers_are_many(chains: dict[int, Chain]) -> None:
    chain = chains[2]
    four = Chain(chain.function, chain.rows, tuple(
        replace(call, layer=call.layer + 3 * again, buffers=tuple((name, f"{one}.{again}") for name, one in call.buffers))
        for again in range(5) for call in chain.calls))
    assert [_place(four, rotate).layers for rotate in (0, 5 << 20, 1 << 40)] == [4, 5, 15]


@pytest.mark.slow
def test_a_model_of_one_layer_has_none() -> None:
    assert _chains("bf16", (2,), replace(CONFIG, num_layers=1, layer_windows=(None,)))[2] is None
