"""What the CPU provider answers, without compiling: instruction set, names, buffers, equal answers to equal questions."""

from __future__ import annotations

import dataclasses

import pytest

from relaxpack.errors import CompileError
from relaxpack.kernel_spec import AttentionSpec, EmbeddingSpec, LinearSpec, NormSpec
from relaxpack.schedules.kernels.cpu.isa import Isa
from relaxpack.schedules.kernels.cpu.provider import CpuKernels
from relaxpack.target import TargetSpec
from relaxpack.weight_format import FORMATS

AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512vl")
LINEAR = LinearSpec(64, 64, FORMATS["q4_1"], "decode", "float32", "float32")
ATTENTION = AttentionSpec(2, 4, 2, 64, 64, 16, 8, 128, "float32", "float16", 0.125)


def kernels(features: tuple[str, ...] = AVX2) -> CpuKernels:
    return CpuKernels(TargetSpec("cpu", "some-cpu", features, threads=2))


@pytest.mark.parametrize(("features", "isa"), [
    (AVX2, Isa(8, False)), ((*AVX2, "avxvnni"), Isa(8, True)), (AVX512, Isa(16, False)),
    ((*AVX512, "avx512vnni"), Isa(16, True)), ((*AVX2, "avx512f"), Isa(8, False))])
def test_isa_follows_the_features(features: tuple[str, ...], isa: Isa) -> None:
    assert kernels(features).isa == isa


def test_a_cpu_without_avx2_is_refused() -> None:
    with pytest.raises(CompileError, match="need AVX2, FMA and F16C, it has avx2"):
        kernels(("avx2",))


def test_equal_questions_get_the_same_kernel() -> None:
    k = kernels()
    assert k.linear(LINEAR) is k.linear(dataclasses.replace(LINEAR))
    assert k.linear(LINEAR) is not k.linear(dataclasses.replace(LINEAR, phase="prefill"))


def test_stage_names_are_unique_where_specs_differ_in_what_a_name_leaves_out() -> None:
    k = kernels()
    specs = [ATTENTION, dataclasses.replace(ATTENTION, scale=0.5), dataclasses.replace(ATTENTION, max_pages=9)]
    names = [make(spec).stages[0].name for spec in specs
             for make in (k.decode_attention, k.prefill_attention, k.rope_append)]
    assert len(set(names)) == 9


def test_buffers_are_named_in_parameter_order() -> None:
    k = kernels()
    full = dataclasses.replace(LINEAR, bias=True, residual=True)
    answers = {
        "linear": (k.linear(full), ("x", "weight", "bias", "residual"), ("y",)),
        "embedding": (k.embedding(EmbeddingSpec(64, 64, FORMATS["q8_0"], "float32")), ("token_ids", "weight"), ("y",)),
        "norm": (k.norm(NormSpec(64, 1e-5, "float32", True)), ("x", "residual", "weight"), ("total", "y")),
        "rope": (k.rope_append(dataclasses.replace(ATTENTION, qk_norm_epsilon=1e-6)),
                 ("qkv", "rope_table", "positions", "slots", "q_norm", "k_norm", "pages", "layer"), ("q",)),
        "decode": (k.decode_attention(ATTENTION), ("q", "pages", "page_table", "lengths", "layer"), ("y",)),
    }
    for kernel, inputs, outputs in answers.values():
        stage, = kernel.stages
        assert (stage.inputs, stage.outputs) == (inputs, outputs)
        function = stage.func
        names = [p.name for p in function.params]
        assert len(names) == len(inputs) + len(outputs)
        assert [n.removesuffix("_handle") for n in names] == [*inputs, *outputs]
        assert int(function.attrs["op_pattern"]) == 8 and function.attrs["tirx.is_scheduled"]
    assert answers["rope"][0].stages[0].inplace == ("pages",)


@pytest.mark.parametrize(("change", "message"), [
    ({"kv_dtype": "bfloat16"}, "KV dtype bfloat16"), ({"num_heads": 5}, "5 heads are not a multiple of 2"),
    ({"rotary_dim": 63}, "rotary_dim 63 must be even"), ({"activation_dtype": "float16"}, "float32 activations")])
def test_attention_that_cannot_be_served_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        kernels().decode_attention(dataclasses.replace(ATTENTION, **change))  # type: ignore[arg-type]
