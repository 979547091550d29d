"""FuseNormLinear: a norm between matmuls disappears into both of them. The matmul before it (which adds the residual) also
writes its result times the norm's weight, and sums of squares; those after it multiply that and scale by 1 / rms.

    y = linear(x, w); total, n = add_rms_norm(y, r, g); linear(n, v)
        → total, scaled, squares = linear+residual+prepares_norm(x, w, r, g); linear+norm(scaled, v, squares)

The provider is asked for every matmul involved, and all must agree: kernels for few rows of a GPU do, so the functions of
small buckets change and the others do not. Also matches a norm alone behind a matmul that adds the residual already (after
FuseResidual). Declines norms that anything but matmuls reads. Needs FuseAddNorm and SpecializeBuckets before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import NORM_GROUP, KernelProvider
from relaxpack.passes.linear_call import (
    BIAS,
    NORM,
    PREPARES_NORM,
    RESIDUAL,
    flags_of,
    is_linear,
    phase_of,
    read_linear,
)
from relaxpack.passes.rewrite import FunctionRewriter, operands_of, placeholder, placeholder_name
from relaxpack.placeholders import ADD_RMS_NORM, LINEAR, RMS_NORM
from tvm import relax
from tvm.relax.expr_functor import mutator


@dataclass
class _Fold:
    """One norm that disappears."""

    producer: Any            # the matmul before the norm
    residual: Any
    weight: Any
    epsilon: Any
    alone: bool              # the matmul adds the residual already
    results: Any             # the new call's tuple; not alone: the variable of the old norm's, which stays in its place


@mutator
class _Rewriter(FunctionRewriter):
    def __init__(self, mod: tvm.IRModule, provider: KernelProvider) -> None:
        super().__init__(mod)
        self.provider = provider
        self.function = ""
        self.norms: list[tuple[Any, _Fold]] = []        # norm call (alone: and the matmul's) → its fold
        self.inputs: dict[Any, _Fold] = {}              # variable that is a norm's result → its fold

    def _rewrite_function(self, name: str, func: relax.Function) -> relax.Function:
        self.function, self.norms, self.inputs = name, [], {}
        return super()._rewrite_function(name, func)

    def visit_dataflow_block_(self, block: Any) -> Any:
        for var, value in self.definitions.items():
            if placeholder_name(value) in (ADD_RMS_NORM, RMS_NORM):
                self._plan(var, value)
        return super().visit_dataflow_block_(block)

    def _plan(self, var: Any, norm: Any) -> None:
        alone = placeholder_name(norm) == RMS_NORM
        result = var if alone else self._item(var, 1)
        fold = self._before(var, norm, alone)
        if fold is None or result is None or not self._agreed(fold, result):
            return
        self.norms.append((norm, fold))
        if alone:
            self.norms.append((fold.producer, fold))
        self.inputs[result] = fold

    def _before(self, var: Any, norm: Any, alone: bool) -> _Fold | None:
        *tensors, weight, epsilon = operands_of(norm)
        if alone:
            linear = self.definition(tensors[0])
            if is_linear(linear) and set(flags_of(linear)) in ({RESIDUAL}, {BIAS, RESIDUAL}):
                residual = operands_of(linear)[-3]
                return _Fold(linear, residual, weight, epsilon, True, None)
            return None
        for one, other in (tensors, tensors[::-1]):
            linear = self.definition(one)
            if is_linear(linear) and set(flags_of(linear)) <= {BIAS} and len(self.users[one]) == 1 \
                    and not one.same_as(other):
                return _Fold(linear, other, weight, epsilon, False, var)
        return None

    def _agreed(self, fold: _Fold, result: Any) -> bool:
        """Whether nothing but matmuls reads the norm's result, and the provider has kernels for all of them."""
        readers = [value for _, value in self.users[result]]
        if not readers or fold.residual.same_as(operands_of(fold.producer)[0]):
            return False
        questions = [replace(self._spec(fold.producer), residual=True, prepares_norm=True)]
        for reader in readers:
            operands = operands_of(reader) if is_linear(reader) else []
            if sum(one.same_as(result) for one in operands) != 1 or not operands[0].same_as(result):
                return False
            questions.append(replace(self._spec(reader), norm_epsilon=float(fold.epsilon.value)))
        return all(self.provider.folds_norm(spec) for spec in questions)

    def _spec(self, linear: Any) -> Any:
        operands = operands_of(linear)
        return read_linear(linear, operands, phase_of(self.function, operands[0])).spec

    def _item(self, var: Any, index: int) -> Any | None:
        """The one variable bound to an item of a tuple."""
        found = [user for user, value in self.users[var] if isinstance(value, relax.TupleGetItem) and value.index == index]
        return found[0] if len(found) == 1 else None

    # -- rewriting ------------------------------------------------------------------------------------------------

    def rewrite(self, call: Any) -> Any | None:
        for old, fold in self.norms:
            if old.same_as(call):
                return self._norm_or_producer(call, fold)
        if is_linear(call) and (found := self.inputs.get(operands_of(call)[0])) is not None:
            *operands, fmt, gated = map(self.new, operands_of(call))
            squares = self.emit(relax.TupleGetItem(self.new(found.results), 2))
            return placeholder(f"{placeholder_name(call)}+{NORM}",
                               [*operands, squares, found.epsilon, fmt, gated], call.ty)
        return None

    def _norm_or_producer(self, call: Any, fold: _Fold) -> Any:
        if not fold.alone:
            return self._prepared(fold)         # total and y become total and scaled, with squares behind them
        if call.same_as(fold.producer):
            fold.results = self.emit(self._prepared(fold))
            return relax.TupleGetItem(fold.results, 0)
        return relax.TupleGetItem(fold.results, 1)

    def _prepared(self, fold: _Fold) -> Any:
        *operands, fmt, gated = map(self.new, operands_of(fold.producer))
        residual = [] if fold.alone else [self.new(fold.residual)]
        flags = f"+{BIAS}" * (BIAS in flags_of(fold.producer)) + f"+{RESIDUAL}+{PREPARES_NORM}"
        total = fold.producer.ty
        rows, features = total.shape
        squares = relax.TensorType([rows, int(features) // NORM_GROUP], "float32")
        return placeholder(LINEAR + flags, [*operands, *residual, self.new(fold.weight), fmt, gated],
                           [total, total, squares])


def FuseNormLinear(provider: KernelProvider) -> Any:
    """The pass."""

    @tvm.transform.module_pass(opt_level=0, name="FuseNormLinear")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        return _Rewriter(mod, provider).run()

    return run
