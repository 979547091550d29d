"""Which code runs on which machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relaxpack import __version__
from relaxpack.dist.compat import choose_target, interface_reasons, reasons_against
from relaxpack.dist.host import Gpu, Host, cuda_driver, detect_host
from relaxpack.step_interface import STEP_INTERFACE
from relaxpack.target import TargetSpec, host_cpu_features
from tests.helpers.bundles import target_entry


def gpu_host(*capabilities: tuple[int, int]) -> Host:
    gpus = tuple(Gpu(f"GPU{i}", c, 1 << 34) for i, c in enumerate(capabilities))
    return Host("x86_64", ("avx2", "fma", "f16c"), gpus)


def test_the_step_interface_is_compared() -> None:
    entry = target_entry([])
    assert interface_reasons(entry, "0.1.0") == (), "bundles of before there were numbers"
    assert interface_reasons(replace(entry, step_interface=STEP_INTERFACE["cpu"]), "0.1.0") == ()
    (newer,) = interface_reasons(replace(entry, step_interface=STEP_INTERFACE["cpu"] + 1), "9.9")
    here = STEP_INTERFACE["cpu"]
    assert newer == (f"cpu:x86-64-v3 was built by relaxpack 9.9 with step interface {here + 1}, this one ({__version__}) "
                     f"needs {here}: install relaxpack 9.9 or newer, or build it again with "
                     "relaxpack build MODEL --target cpu:x86-64-v3 -o NEW_BUNDLE")


def test_an_older_step_interface_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEP_INTERFACE, "cpu", 7)   # type: ignore[arg-type]
    (older,) = interface_reasons(replace(target_entry([]), step_interface=6), "0.1.0")
    assert "step interface 6, this one" in older and "needs 7: build it again with" in older


def test_functions_that_are_missing_are_an_older_interface() -> None:
    entry = replace(target_entry([]), target=TargetSpec("cuda", "sm_90a"), functions=("prefill", "decode", "sample"))
    (reason,) = interface_reasons(entry, "0.0.3")
    assert "relaxpack 0.0.3, whose step functions had no top_logprobs: build it again" in reason
    assert interface_reasons(replace(entry, functions=("embed",)), "0.0.3") == ()


@pytest.mark.parametrize(("arch", "capability", "runs"), [
    ("sm_80", (8, 0), True), ("sm_80", (8, 6), True), ("sm_80", (8, 9), True), ("sm_80", (9, 0), False),
    ("sm_86", (8, 0), False), ("sm_86", (8, 9), True), ("sm_89", (8, 6), False), ("sm_90", (9, 0), True),
    ("sm_90", (10, 0), False), ("sm_90a", (9, 0), True), ("sm_90a", (10, 0), False), ("sm_90a", (8, 9), False),
    ("sm_100a", (10, 0), True), ("sm_100a", (10, 3), False), ("sm_120", (12, 0), True), ("sm_120", (12, 1), True),
    ("sm_120", (10, 0), False)])
def test_machine_code_for_gpus(arch: str, capability: tuple[int, int], runs: bool) -> None:
    reasons = reasons_against(TargetSpec("cuda", arch), gpu_host(capability))
    assert (reasons == ()) is runs
    if not runs:
        assert f"GPU0 has {capability[0]}.{capability[1]}" in reasons[0]


def test_the_first_gpu_counts() -> None:
    assert reasons_against(TargetSpec("cuda", "sm_90a"), gpu_host((9, 0), (8, 0))) == ()
    assert reasons_against(TargetSpec("cuda", "sm_90a"), gpu_host((8, 0), (9, 0))) == (
        "it needs compute capability exactly 9.0, GPU0 has 8.0 (GPU 1 would do: set CUDA_VISIBLE_DEVICES=1)",)


def test_reasons_are_named() -> None:
    host = gpu_host()
    assert reasons_against(TargetSpec("cuda", "sm_90a"), host) == (
        "this machine has no NVIDIA GPU that its driver shows",)
    assert reasons_against(TargetSpec("cpu", "x86-64-v4", ("avx2", "avx512f", "avx512bw")), host) == (
        "this CPU lacks avx512f avx512bw",)
    assert "aarch64" in reasons_against(TargetSpec("cpu", "x86-64-v3", ()), replace(host, machine="aarch64"))[0]
    assert "unknown" in reasons_against(TargetSpec("npu", "x"), host)[0]
    assert "unknown" in reasons_against(TargetSpec("cuda", "compute_90"), host)[0]


def test_the_best_target_is_chosen() -> None:
    specs = [TargetSpec("cpu", "x86-64-v3", ("avx2",)), TargetSpec("cpu", "znver4", ("avx2", "fma")),
             TargetSpec("cuda", "sm_90"), TargetSpec("cuda", "sm_90a"), TargetSpec("cpu", "x86-64-v4", ("avx512f",))]
    entries = [target_entry([], spec) for spec in specs]

    def chosen(host: Host, kind: str | None = None) -> str | None:
        entry = choose_target(entries, host, kind)
        return entry and entry.target.arch

    assert chosen(gpu_host((9, 0))) == "sm_90a"
    assert chosen(gpu_host((8, 0))) == "znver4"
    assert chosen(gpu_host((9, 0)), kind="cpu") == "znver4"
    assert chosen(gpu_host((8, 0)), kind="cuda") is None


def test_this_machine() -> None:
    host = detect_host()
    assert host.cpu_features == host_cpu_features()
    assert reasons_against(TargetSpec("cpu", "any", host.cpu_features), host) == ()
    driver = cuda_driver()
    assert bool(driver.gpus) <= (driver.version is not None)
    assert driver.gpus or driver.problem
