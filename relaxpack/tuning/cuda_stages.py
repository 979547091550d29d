"""`Stages`: the functions of one kernel for a GPU, called one after the other with buffers by their names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relaxpack.kernel_spec import Kernel
from relaxpack.tuning.cuda_cases import poisoned

Launch = Callable[[Mapping[str, Any]], None]


def described(kernel: Kernel) -> dict[str, Any]:
    """How to call a kernel, in plain values: its functions in order, and the buffers between them."""
    return {"stages": [{"function": stage.name, "arguments": [*stage.inputs, *stage.outputs]} for stage in kernel.stages],
            "temporaries": {name: [list(shape), dtype] for name, (shape, dtype) in kernel.temporaries.items()}}


def description_of(path: str) -> Path:
    return Path(path).with_suffix(".json")


class Stages:
    """`function`: what a name stands for; `told`: see `described`; `gpu`: where temporaries are."""

    def __init__(self, gpu: Any, function: Callable[[str], Any], told: Mapping[str, Any]) -> None:
        self._gpu, self._temporaries = gpu, told["temporaries"]
        self._calls = [(function(stage["function"]), stage["arguments"]) for stage in told["stages"]]

    def bound(self, rows: int) -> Launch:
        """With temporaries for so many rows."""
        sizes = {"t": rows, "b": rows}
        held = {name: self._gpu.place(poisoned(tuple(sizes.get(d, d) for d in shape), dtype))
                for name, (shape, dtype) in self._temporaries.items()}

        def launch(buffers: Mapping[str, Any]) -> None:
            for function, arguments in self._calls:
                function(*[held[name] if name in held else buffers[name] for name in arguments])

        return launch


def load_stages(gpu: Any, path: str) -> Stages:
    """Of a library with its description beside it."""
    module = gpu.load(path)
    return Stages(gpu, lambda name: module[name], json.loads(description_of(path).read_text()))
