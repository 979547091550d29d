"""May this host and this relaxpack run this bundle? Answers with reasons, not booleans: an empty tuple of reasons means yes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from relaxpack import __version__
from relaxpack.dist.host import Host
from relaxpack.dist.manifest import TargetEntry
from relaxpack.errors import TargetMismatchError
from relaxpack.step_interface import STEP_INTERFACE, missing_functions
from relaxpack.target import TargetSpec

_X86 = ("x86_64", "amd64", "AMD64")


def reasons_against(target: TargetSpec, host: Host) -> tuple[str, ...]:
    """Why `host` cannot run code for `target`; empty where it can."""
    if target.kind == "cpu":
        return _against_cpu(target, host)
    if target.kind == "cuda":
        return _against_cuda(target, host)
    return (f"target kind {target.kind!r} is unknown to this relaxpack",)


def _against_cpu(target: TargetSpec, host: Host) -> tuple[str, ...]:
    if host.machine not in _X86:
        return (f"it is for x86-64 CPUs and this one is {host.machine}",)
    missing = [feature for feature in target.features if feature not in host.cpu_features]
    return (f"this CPU lacks {' '.join(missing)}",) if missing else ()


def _against_cuda(target: TargetSpec, host: Host) -> tuple[str, ...]:
    parsed = re.fullmatch(r"sm_(\d+)(\d)([a-z]?)", target.arch)
    if not parsed:
        return (f"GPU architecture {target.arch!r} is unknown to this relaxpack",)
    if not host.gpus:
        return ("this machine has no NVIDIA GPU that its driver shows",)
    major, minor, suffix = int(parsed[1]), int(parsed[2]), parsed[3]
    fitting = [index for index, gpu in enumerate(host.gpus) if _runs(major, minor, suffix, gpu.capability)]
    if 0 in fitting:   # the runtime takes the first visible GPU
        return ()
    have = f"{host.gpus[0].name} has {host.gpus[0].capability[0]}.{host.gpus[0].capability[1]}"
    if fitting:
        have += f" (GPU {fitting[0]} would do: set CUDA_VISIBLE_DEVICES={fitting[0]})"
    # Machine code serves its own major version from its minor upwards; with a suffix ("a") exactly its own GPU.
    if suffix == "a":
        need = f"exactly {major}.{minor}"
    elif suffix == "f" or minor == 0:
        need = f"{major}.{minor} or a later {major}.x"
    else:
        need = f"{major}.{minor} to {major}.9"
    return (f"it needs compute capability {need}, {have}",)


def _runs(major: int, minor: int, suffix: str, capability: tuple[int, int]) -> bool:
    if suffix == "a":
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def choose_target(entries: Sequence[TargetEntry], host: Host, kind: str | None = None) -> TargetEntry | None:
    """The best entry that runs here: GPU before CPU, then the most specific (an "a" architecture, more features)."""
    fitting = [entry for entry in entries
               if kind in (None, entry.target.kind) and not reasons_against(entry.target, host)]
    return max(fitting, key=_specificity, default=None)


def interface_reasons(entry: TargetEntry, writer: str) -> tuple[str, ...]:
    """Why the runtime of this relaxpack cannot call the functions of a target that relaxpack `writer` built, and what to do;
    empty where it can, or where the manifest does not say."""
    here = STEP_INTERFACE.get(entry.target.kind)
    if entry.step_interface is not None and here is not None and entry.step_interface != here:
        newer = f"install relaxpack {writer} or newer, or " if entry.step_interface > here else ""
        return (f"{entry.target.name} was built by relaxpack {writer} with step interface {entry.step_interface}, this one "
                f"({__version__}) needs {here}: {newer}{_again(entry)}",)
    if missing := missing_functions(entry.target.kind, entry.functions):
        return (f"{entry.target.name} was built by relaxpack {writer}, whose step functions had no "
                f"{' and no '.join(missing)}: {_again(entry)}",)
    return ()


def other_inputs(entry: TargetEntry, writer: str, function: str, given: Sequence[str], expected: Sequence[str]) -> str:
    """Why a library is not called whose function takes other inputs than the step interface says."""
    differing = sorted(set(given) ^ set(expected)) or ["their order"]
    return (f"{entry.target.name} was built by relaxpack {writer} with another step interface than the "
            f"{STEP_INTERFACE[entry.target.kind]} of this one ({__version__}): the inputs of {function} differ "
            f"({', '.join(differing)}): {_again(entry)}")


def _again(entry: TargetEntry) -> str:
    return f"build it again with relaxpack build MODEL --target {entry.target.name} -o NEW_BUNDLE"


def _specificity(entry: TargetEntry) -> tuple[bool, bool, int, str]:
    target = entry.target
    return target.kind == "cuda", target.arch.endswith("a"), len(target.features), target.arch


def mismatch(entries: Sequence[TargetEntry], host: Host, source: str, kind: str | None = None) -> TargetMismatchError:
    """What the bundle has, what this host is, what is missing, and the command that builds a fitting one."""
    why = "; ".join(f"{entry.target.name}: " + ("another kind was asked for" if kind not in (None, entry.target.kind)
                                                else ", ".join(reasons_against(entry.target, host)))
                    for entry in entries)
    possible = None if kind == "cuda" and not host.gpus else kind
    name = possible or ("cuda" if host.gpus and all(entry.target.kind == "cuda" for entry in entries) else "cpu")
    advice = f"Build one for it from {source}: relaxpack build MODEL --target {name} -o NEW_BUNDLE"
    if possible != kind:
        others = any(entry.target.kind != "cuda" for entry in entries)
        advice = "Nothing built for cuda runs here" + (
            ": without --device cuda, what fits is taken" if others else f", and the bundle has nothing else. {advice}")
    cpu_refused = any(entry.target.kind == "cpu" and kind != "cuda" for entry in entries)
    return TargetMismatchError(f"the bundle does not fit this machine: {why or 'it has no targets'}. This machine: "
                               f"{host.described(features=cpu_refused)}. {advice}")
