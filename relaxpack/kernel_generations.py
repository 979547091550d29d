"""Which generation of a family of kernels a tuning record has measured: a fact of its compiler, so that records count only
for the kernels that they are about. One number for each family: a change of one leaves the records of the others alone.
CUDA's matmuls of quantised weights have numbers of their own (those of few rows, of which a block takes many, another one),
though in records their family is that of all matmuls.

Raise a family's number when its kernels change so that their times may; never for a change that leaves the generated text
as it is. `tests/numerics/test_kernel_texts.py` compares that text and fails where a number was forgotten.
"""

from __future__ import annotations

from relaxpack.tuning_record import Facts, Workload

GENERATIONS = {
    "cpu.linear_quantized": 1, "cpu.linear_float": 1, "cpu.decode_attention": 2, "cpu.prefill_attention": 1, "cpu.norm": 1,
    "cpu.rope_append": 1,
    "cuda.linear": 3, "cuda.linear_quantized": 4, "cuda.linear_quantized_few": 5, "cuda.norm": 2,
    "cuda.decode_attention": 2, "cuda.prefill_attention": 4, "cuda.rope_append_attention": 2, "cuda.rope_append": 2,
}
OTHERS = {"cpu": 1, "cuda": 2}      # of what TVM schedules


def for_workload(compiler: Facts, workload: Workload) -> Facts:
    """The facts of a compiler as records of this work have them."""
    generation = GENERATIONS.get(kernels_of(workload))
    return compiler if generation is None else {**compiler, "kernels": generation}


def kernels_of(workload: Workload) -> str:
    """The name by which GENERATIONS has them."""
    told = workload.told
    try:
        if told["family"] == "cuda.linear" and int(told["spec"]["weight"]["bits"]) < 16:
            few = 8 < int(told["spec"].get("max_rows") or 0) <= 192
            return "cuda.linear_quantized_few" if few else "cuda.linear_quantized"
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        pass
    return workload.family
