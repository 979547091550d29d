"""Crash reports of the pass pipeline: where a pass failed, and a file that fails in the same way.

A reproducer is a JSON file with the module that the pass was given and everything the pass was made from (config,
limits, target, weight formats, pipeline switches); `replay` makes the pass again and runs it. No weights are in it.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.compile.kernels import attention_spec, kernel_provider
from relaxpack.errors import UsageError
from relaxpack.passes.config import PipelineConfig
from relaxpack.passes.pipeline import PassFailure, phases, run_pass
from relaxpack.passes.rewrite import exported_functions
from relaxpack.relax_models.config import ModelConfig
from relaxpack.relax_models.export import BuildLimits
from relaxpack.relax_models.rope import RopeConfig
from relaxpack.schedules.rest import rest_rule
from relaxpack.target import TargetSpec
from relaxpack.weight_format import FORMATS
from tvm import relax

FORMAT = "relaxpack reproducer 1"
_NAMES = ("disabled", "enabled", "fixed_weights")    # sets of names in PipelineConfig


@dataclass(frozen=True)
class Inputs:
    """What the phases are made from. `formats`: name of the weight format of each matrix."""

    config: ModelConfig
    limits: BuildLimits
    target: TargetSpec
    formats: dict[str, str]
    activation_dtype: str
    kv_dtype: str
    pipeline: PipelineConfig

    def to_json(self) -> dict[str, Any]:
        pipeline = dataclasses.asdict(self.pipeline)
        return {"config": self.config.to_json(), "limits": dataclasses.asdict(self.limits),
                "target": self.target.to_json(), "formats": self.formats, "activation_dtype": self.activation_dtype,
                "kv_dtype": self.kv_dtype, "pipeline": {**pipeline, **{name: sorted(pipeline[name]) for name in _NAMES}}}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Inputs:
        config, pipeline = dict(data["config"]), dict(data["pipeline"])
        rope: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config["rope"].items()}
        config |= {"rope": RopeConfig(**rope), "layer_windows": tuple(config["layer_windows"])}
        pipeline = {k: tuple(v) if isinstance(v, list) else v for k, v in pipeline.items()}
        pipeline |= {name: frozenset(pipeline.get(name, ())) for name in _NAMES}
        return cls(ModelConfig(**config), BuildLimits(**data["limits"]), TargetSpec.from_json(data["target"]),
                   data["formats"], data["activation_dtype"], data["kv_dtype"], PipelineConfig(**pipeline))


def crash_report(failure: PassFailure, inputs: Inputs, folder: Path | None = None) -> str:
    """The message for the user; writes the reproducer into `folder` (None: the folder for temporary files)."""
    where = locate(failure, inputs.target)
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"relaxpack-{failure.one_pass.info.name}.reproducer.json"
    path.write_text(json.dumps({
        "format": FORMAT, "phase": failure.phase, "index": failure.index, "pass": str(failure.one_pass.info.name),
        "why": failure.why, "where": where, "inputs": inputs.to_json(), "module": tvm.ir.save_json(failure.module)}))
    return f"{failure}{f' (in {where})' if where else ''}; `relaxpack replay {path}` fails in the same way"


def locate(failure: PassFailure, target: TargetSpec) -> str | None:
    """Function, operation and shapes where the pass fails: the shortest beginning of one exported function that still
    makes it fail. None where it only fails on the whole module."""
    tvm_target = target.to_tvm()

    def fails(mod: tvm.IRModule) -> bool:
        try:
            run_pass(mod, tvm_target, failure.phase, failure.index, failure.one_pass)
        except Exception:
            return True
        return False

    for gv, func in exported_functions(failure.module):
        bindings = [b for block in func.body.blocks for b in block.bindings]
        if not fails(_alone(failure.module, gv, func)):
            continue
        low, high = 0, len(bindings)            # `high` bindings fail, `low` do not
        if not bindings or not fails(_alone(failure.module, gv, _beginning(func, high))):
            return gv.name_hint
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails(_alone(failure.module, gv, _beginning(func, middle))) \
                else (middle, high)
        return f"{gv.name_hint}: {describe(bindings[high - 1])}"
    return None


def _alone(mod: tvm.IRModule, gv: Any, func: relax.Function) -> tvm.IRModule:
    others = {other for other, _ in exported_functions(mod)} - {gv}
    kept = {g: f for g, f in mod.functions_items() if g not in others}
    return tvm.IRModule({**kept, gv: func}, attrs=mod.attrs)


def _beginning(func: relax.Function, count: int) -> relax.Function:
    """The function cut off after `count` bindings; it returns the last of them."""
    bindings = [b for one in func.body.blocks for b in one.bindings][:count]
    last = bindings[-1].var
    result = relax.Var("cut", last.ty)
    made = relax.DataflowBlock if isinstance(func.body.blocks[0], relax.DataflowBlock) else relax.BindingBlock
    body = relax.SeqExpr([made([*bindings, relax.VarBinding(result, last)])], result)
    return relax.Function(func.params, body, last.ty, func.is_pure, func.attrs)


def describe(binding: Any) -> str:
    """`lv5: R.Tensor((t, 576)) = relax.add(R.Tensor((t, 576)), R.Tensor((t, 576)))`."""
    value = binding.value
    if not isinstance(value, tvm.ir.Call):
        return f"{binding.var.name} = {str(value)[:120]}"
    name = value.op.name_hint if isinstance(value.op, tvm.ir.GlobalVar) else getattr(value.op, "name", str(value.op))
    operands: list[Any] = []
    for arg in value.args:
        if isinstance(arg, tvm.ir.GlobalVar | relax.ExternFunc):
            name = arg.name_hint if isinstance(arg, tvm.ir.GlobalVar) else str(arg.global_symbol)
        else:
            operands += arg.fields if isinstance(arg, relax.Tuple) else [arg]
    shown = [str(operand.ty) if isinstance(operand, relax.Var) else str(operand)[:40] for operand in operands]
    return f"{binding.var.name}: {binding.var.ty} = {name}({', '.join(shown)})"


def replay(path: Path) -> str:
    """Run the pass of a reproducer. Raises the PassFailure again; answers what happened where it passes now."""
    try:
        data = json.loads(path.read_text())
        if data.get("format") != FORMAT:
            raise ValueError(f"format {data.get('format')!r}, expected {FORMAT!r}")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: not a reproducer of this relaxpack: {error}") from error
    inputs = Inputs.from_json(data["inputs"])
    one_pass = _pass(inputs, data["phase"], data["index"], data["pass"])
    run_pass(tvm.ir.load_json(data["module"]), inputs.target.to_tvm(), data["phase"], data["index"], one_pass)
    return f"pass {data['pass']} of phase {data['phase']!r} does not fail any more"


def _pass(inputs: Inputs, phase: str, index: int, name: str) -> Any:
    attention = attention_spec(inputs.config, inputs.limits, inputs.activation_dtype, inputs.kv_dtype)
    formats = {tensor: FORMATS[fmt] for tensor, fmt in inputs.formats.items()}
    rule = rest_rule(inputs.target)
    passes = dict(phases(kernel_provider(inputs.target), attention, formats, inputs.pipeline, rule)).get(phase, [])
    if index >= len(passes) or str(passes[index].info.name) != name:
        raise UsageError(f"the pipeline of this relaxpack has no pass {name} at place {index} of phase {phase!r}")
    return passes[index]
