"""Case C08: a tied head, from the checkpoint to the parameters of the compiled functions. One table in memory, also when it
is quantised; a head that differs is its own table, with a warning; nothing is tied or split silently.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.compile.kernels import attention_spec, kernel_provider
from relaxpack.compile.weights import ParameterMaker, choose_formats
from relaxpack.passes.config import PipelineConfig
from relaxpack.passes.pipeline import phases, run_phases
from relaxpack.passes.rewrite import exported_functions, num_inputs, recipes_of
from relaxpack.recipe import Pack, matrix_tensors
from relaxpack.relax_models.checkpoint import Checkpoint, open_checkpoint
from relaxpack.relax_models.export import BuildLimits, export_model
from relaxpack.target import parse_target
from tests.helpers.tiny_checkpoints import make_config, make_tensors, write_checkpoint

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
LIMITS = BuildLimits(64, max_batch=2, prefill_chunk=16)


def tables(checkpoint: Checkpoint, weights: str, *, level_0: bool = False) -> dict[str, Pack]:
    """The parameters that hold embedding or head after packing and fusion, as every function takes them."""
    target, formats = parse_target("cpu"), choose_formats(checkpoint, weights)
    left_out = frozenset({"CombineParallelMatmul", "FuseEpilogues", "FuseAddNorm"}) if level_0 else frozenset()
    all_phases = phases(kernel_provider(target), attention_spec(checkpoint.config, LIMITS, "float32", "float16"), formats,
                        PipelineConfig(left_out))
    mod = run_phases(export_model(checkpoint.config, LIMITS, "float32", "float16"), tvm.target.Target("llvm"),
                     all_phases[:3])
    recipes = recipes_of(mod)
    found = [{v.name: recipes[v.name] for v in func.params[num_inputs(func):] if v.name in recipes}
             for _, func in exported_functions(mod)]
    assert found[0] == found[1]
    return {name: made_by for name, made_by in found[0].items()
            if isinstance(made_by, Pack) and {HEAD, TABLE} & set(matrix_tensors(made_by))}


def checkpoint(folder: Path, tie: object, head: str) -> Checkpoint:
    tensors = make_tensors(make_config("llama"))
    if head == "absent":
        del tensors[HEAD]
    elif head == "equal":
        tensors[HEAD] = tensors[TABLE].copy()
    return open_checkpoint(write_checkpoint(folder / "m", tensors=tensors, tie_word_embeddings=tie))


@pytest.mark.parametrize("weights", ["f32", "q8", "q4"])
@pytest.mark.parametrize("tie, head", [(True, "absent"), (True, "equal"), (..., "absent")], ids=["a", "b", "d"])
def test_one_table_whatever_its_format(tmp_path: Path, tie: object, head: str, weights: str) -> None:
    opened = checkpoint(tmp_path, tie, head)
    assert bool([w for w in opened.audit.warnings if HEAD in w]) == (tie is ...)       # (d) is said
    (made_by,) = tables(opened, weights).values()
    assert matrix_tensors(made_by) == [TABLE]
    assert made_by.format == ("f32" if weights == "f32" else "q8_0")                   # q4: a table stays at 8 bits
    packed = ParameterMaker(opened, kernel_provider(parse_target("cpu"))).make(made_by, "uint8" if weights != "f32"
                                                                               else "float32")
    assert packed.nbytes >= np.prod(opened.tensors[TABLE].shape)
    assert tables(opened, weights, level_0=True) == tables(opened, weights)


def test_a_head_that_differs_is_taken_and_said(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, True, "different")                                   # (c)
    assert [w for w in opened.audit.warnings if HEAD in w and "differs" in w]
    assert sorted(name for made_by in tables(opened, "q4").values() for name in matrix_tensors(made_by)) == [HEAD, TABLE]
