"""FoldNormWeights and FoldScales: what multiplies activations goes into weights, where that changes nothing but rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack import recipe
from relaxpack.compile.weights import ParameterMaker, fixed_weights
from relaxpack.passes.fold_norm_weights import FoldNormWeights
from relaxpack.passes.fold_scales import FoldScales
from relaxpack.passes.rewrite import exported_functions, notes_of, recipes_of
from relaxpack.recipe import Concat, Filled, FromCheckpoint, Pack, Recipe, ScaleBy, ScaleColumns, matrix_tensors
from relaxpack.relax_models.quantize import quantize
from relaxpack.weight_format import FORMATS
from tests.helpers.ir import check_declines, check_pass
from tests.helpers.plain_kernels import PlainKernels
from tvm import relax
from tvm.runtime.vm import VirtualMachine

SHAPES = {"g": [8], "u": [6, 8], "v": [4, 8], "b": [6], "ones.8": [8], "u*norm": [6, 8], "v*norm": [4, 8], "u*0.5": [6, 8],
          "b*0.5": [6], "g*0.5": [8]}
Body = Callable[[relax.BlockBuilder, Any, dict[str, Any]], Any]


def module(names: list[str], body: Body) -> tvm.IRModule:
    """A function of x f32[4, 8] and these parameters; `body` gives its result."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([4, 8], "float32"))
    parameters = {name: relax.Var(name, relax.TensorType(SHAPES[name], "float32")) for name in names}
    with builder.function("step", [x, *parameters.values()], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.silu(body(builder, x, parameters)))
        builder.emit_func_output(out)
    return builder.get()


def linear(builder: Any, x: Any, weight: Any) -> Any:
    return builder.emit(relax.op.matmul(x, builder.emit(relax.op.permute_dims(weight))))


def norm(builder: Any, x: Any, weight: Any) -> Any:
    return builder.emit(relax.op.nn.rms_norm(x, weight, axes=-1, epsilon=0.5))


def two_matmuls(g: str, u: str, v: str) -> Body:
    def body(builder: Any, x: Any, p: dict[str, Any]) -> Any:
        n = norm(builder, x, p[g])
        return builder.emit(relax.op.concat([linear(builder, n, p[u]), linear(builder, n, p[v])], axis=1))
    return body


FOLDED: dict[str, Recipe] = {"ones.8": Filled((8,), 1.0),
                             "u*norm": ScaleColumns(FromCheckpoint("u"), FromCheckpoint("g")),
                             "v*norm": ScaleColumns(FromCheckpoint("v"), FromCheckpoint("g"))}


def test_a_norm_weight_goes_into_all_matmuls_that_read_it() -> None:
    before = module(["g", "u", "v"], two_matmuls("g", "u", "v"))
    # The parameters that died stay until PruneParameters.
    expected = module(["g", "u", "v", "ones.8", "u*norm", "v*norm"], two_matmuls("ones.8", "u*norm", "v*norm"))
    after = check_pass(before, FoldNormWeights(), expected, FOLDED)
    assert notes_of(after) == ["FoldNormWeights: 1 norm weights folded into the next matmul"]


def other_reader(builder: Any, x: Any, p: dict[str, Any]) -> Any:
    n = norm(builder, x, p["g"])
    return builder.emit(relax.op.concat([linear(builder, n, p["u"]), n], axis=1))


def tied(builder: Any, x: Any, p: dict[str, Any]) -> Any:
    n = norm(builder, builder.emit(relax.op.add(x, builder.emit(relax.op.take(p["v"], relax.const([0, 1, 2, 3]), axis=0)))),
             p["g"])
    return linear(builder, n, p["v"])


@pytest.mark.parametrize("names, body, fixed, why", [
    (["g", "u", "v"], other_reader, frozenset(), "more than matmuls read it"),
    (["g", "v"], tied, frozenset(), "the weight has other readers"),
    (["g", "u", "v"], two_matmuls("g", "u", "v"), frozenset({"v"}), "the weight is quantised in the checkpoint")])
def test_norms_that_stay_are_named(names: list[str], body: Body, fixed: frozenset[str], why: str) -> None:
    before = module(names, body)
    after = check_pass(before, FoldNormWeights(fixed), before)
    assert notes_of(after) == [f"FoldNormWeights: 0 norm weights folded into the next matmul; 1 left alone, since {why}: g"]


def scaled(u: str, b: str | None, factor: float | None, readers: int = 1) -> Body:
    def body(builder: Any, x: Any, p: dict[str, Any]) -> Any:
        y = linear(builder, x, p[u])
        y = y if b is None else builder.emit(relax.op.add(y, p[b]))
        z = y if factor is None else builder.emit(relax.op.multiply(y, relax.const(factor, "float32")))
        return z if readers == 1 else builder.emit(relax.op.add(z, y))
    return body


def scaled_norm(g: str, factor: float | None) -> Body:
    def body(builder: Any, x: Any, p: dict[str, Any]) -> Any:
        y = norm(builder, x, p[g])
        return y if factor is None else builder.emit(relax.op.multiply(y, relax.const(factor, "float32")))
    return body


def test_a_factor_goes_into_weight_and_bias() -> None:
    check_pass(module(["u"], scaled("u", None, 0.5)), FoldScales(), module(["u", "u*0.5"], scaled("u*0.5", None, None)),
               {"u*0.5": ScaleBy(FromCheckpoint("u"), 0.5)})
    check_pass(module(["u", "b"], scaled("u", "b", 0.5)), FoldScales(),
               module(["u", "b", "u*0.5", "b*0.5"], scaled("u*0.5", "b*0.5", None)),
               {"u*0.5": ScaleBy(FromCheckpoint("u"), 0.5), "b*0.5": ScaleBy(FromCheckpoint("b"), 0.5)})
    check_pass(module(["g"], scaled_norm("g", 0.5)), FoldScales(), module(["g", "g*0.5"], scaled_norm("g*0.5", None)),
               {"g*0.5": ScaleBy(FromCheckpoint("g"), 0.5)})


def result(mod: tvm.IRModule, x: np.ndarray, maker: ParameterMaker) -> np.ndarray:
    """The function on x, through TVM's own lowering, with parameters made by their recipes."""
    (_, func), = exported_functions(mod)
    recipes = recipes_of(mod)
    parameters = [maker.make(recipes.get(v.name, FromCheckpoint(v.name)), "float32") for v in func.params[1:]]
    machine = VirtualMachine(tvm.compile(mod, tvm.target.Target("llvm")), tvm.cpu())
    return machine["step"](*map(tvm.runtime.tensor, [x, *parameters])).numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("names, body", [(["u", "b"], "linear"), (["g"], "norm")])
def test_folded_factors_keep_the_numbers(names: list[str], body: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(SHAPES[name]).astype(np.float32) for name in names}
    maker = ParameterMaker(_Checkpoint(**arrays), PlainKernels())  # type: ignore[arg-type]
    before = module(names, scaled("u", "b", 0.3) if body == "linear" else scaled_norm("g", 0.3))
    after = FoldScales()(before)
    assert "R.multiply" not in after["step"].script() and "R.multiply" in before["step"].script()
    x = rng.standard_normal((4, 8)).astype(np.float32)
    np.testing.assert_allclose(result(after, x, maker), result(before, x, maker), rtol=0, atol=2e-6)


def test_factors_that_stay() -> None:
    check_declines(module(["u"], scaled("u", None, 0.5, readers=2)), FoldScales())
    check_declines(module(["u"], scaled("u", None, 0.5)), FoldScales(frozenset({"u"})))


class _Tensor:
    def __init__(self, array: Any, quantized: str = "f32") -> None:
        self.shape, self.format, self.array = array.shape, FORMATS[quantized], array


class _Checkpoint:
    def __init__(self, **arrays: Any) -> None:
        self.tensors = {name: _Tensor(a, a.format.name if hasattr(a, "format") else "f32") for name, a in arrays.items()}

    def read(self, name: str) -> Any:
        return self.tensors[name].array


def test_recipes_are_executed_before_quantising() -> None:
    rng = np.random.default_rng(0)
    u, v, g = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 32), (4, 32), (32,)))
    maker = ParameterMaker(_Checkpoint(u=u, v=v, g=g), PlainKernels())  # type: ignore[arg-type]
    both = ScaleColumns(Concat((FromCheckpoint("u"), FromCheckpoint("v"))), FromCheckpoint("g"))
    np.testing.assert_array_equal(maker.make(both, "float32"), np.concatenate([u, v]) * g)
    np.testing.assert_array_equal(maker.make(ScaleBy(FromCheckpoint("g"), 0.25), "float32"), g * np.float32(0.25))
    np.testing.assert_array_equal(maker.make(Filled((3,), 1.0), "float32"), np.ones(3, np.float32))
    assert matrix_tensors(Pack("f32", 10, 32, False, "", both)) == ["u", "v"]
    assert recipe.checkpoint_tensors(both) == ["u", "v", "g"]
    for one in (both, ScaleBy(both, 2.0), Filled((3, 4), 0.5)):
        assert recipe.loads(recipe.dumps({"p": one})) == {"p": one}
    packed = maker._weight(both, FORMATS["q8_0"])
    expected = quantize(np.concatenate([u, v]) * g, FORMATS["q8_0"])
    assert np.array_equal(packed.codes, expected.codes) and np.array_equal(packed.scales, expected.scales)


def test_what_the_checkpoint_stores_quantised_is_fixed() -> None:
    rng = np.random.default_rng(0)
    u = rng.standard_normal((6, 32)).astype(np.float32)
    checkpoint = _Checkpoint(u=u, q=quantize(u, FORMATS["q8_0"]))
    kept = {"u": FORMATS["q4_1"], "q": FORMATS["q8_0"]}
    assert fixed_weights(checkpoint, kept) == {"q"}                                           # type: ignore[arg-type]
    assert fixed_weights(checkpoint, {"u": FORMATS["q4_1"], "q": FORMATS["f16"]}) == set()    # type: ignore[arg-type]
