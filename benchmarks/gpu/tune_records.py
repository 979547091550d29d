"""What a run on the GPU comes to: records of the winners by the rule of noise, and the table of rule, tuned, torch and
roofline. Runs anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.gpu.tune_decisions import Decision, decided, deciding, geometric_mean, means, together_wins
from relaxpack import __version__
from relaxpack.kernel_generations import GENERATIONS, kernels_of
from relaxpack.tuning.duel import chain_facts
from relaxpack.tuning_record import Check, Origin, TuningRecord, Workload

SEED = 1
DECODE_ROWS = 128      # decode steps have no more, as far as kernels are tuned for them
METHOD = "CUDA graph replays in turn, inputs rotated beyond the L2 cache"


def left_out(result: dict[str, Any], decision: Decision) -> str:
    """Why the winner of a task is not kept, or "". Kernels of decode steps must make a layer faster, and all winners of a
    layer together too."""
    task = decision.task
    if not decision.improved or (task["bucket"] > DECODE_ROWS and "chain" not in task):
        return ""
    if "chain" not in task:
        return f"{decision.verdict.why} by itself: whole decode steps with such records were slower"
    together = result.get("together", {}).get(task["chain"], {})
    if together.get("winners", {}).get(task["name"]) != decision.winner["number"]:
        return f"{decision.verdict.why} of a layer, but not timed together with the layer's other winners"
    verdict = together_wins(together)
    return "" if verdict.wins else f"{decision.verdict.why} of a layer, but all winners together: {verdict.why}"


def record(result: dict[str, Any], decision: Decision, winners: bool = True) -> TuningRecord:
    """Where the winner is left out, or without `winners`, the rule stays, and the record says what it lost against."""
    task, why = decision.task, left_out(result, decision)
    if decision.improved and not winners:
        why = why or f"{decision.verdict.why}, but no winners were wanted"
    winner = decision.rule if why else decision.winner
    choice = dict(winner["choice"]) if winner["number"] else {}
    library = choice.pop("library", None)
    kept = ({"kind": "library", "library": library, "parameters": choice} if library
            else {"kind": "parameters", "parameters": choice})
    times = decision.times_us if winner["number"] else means(deciding(task, winner))    # the rule's are its own
    conditions = {"repeats": len(times), "rotated_bytes": min(case["rotated_bytes"] for case in task["cases"]),
                  "method": METHOD, "torch": str(result["torch"])}
    if why:
        conditions["left_out"] = why
    if not why and (layer := decision.in_layer) is not None:
        conditions["chain"] = chain_facts(*layer, task["chain"], task["calls"])
    if winner.get("beside_us"):
        conditions["beside"] = "RMSNorm, launched dependently: its time is part of the time"
    if len(task["cases"]) > 1:
        conditions["cases"] = "geometric mean of " + ", ".join(map(case_text, task["cases"]))
    origin = Origin(result["created"], result["host"], f"relaxpack {__version__}", len(task["candidates"]))
    compiler = {**result["compiler"], "kernels": task["generation"]}      # of when it was compiled
    return TuningRecord(Workload(**task["workload"]), task["bucket"], result["target"], compiler, kept, times, conditions,
                        Check(SEED, round(winner["error"], 6), 1.0), origin, round(decision.rule_us, 4))


def case_text(case: dict[str, Any]) -> str:
    return f"{case['rows']} x {case['tokens']} tokens" if "tokens" in case else f"{case['rows']} rows"


def own_kernels(result: dict[str, Any]) -> dict[str, Any]:
    """The result without the candidates that call a library: a bundle with one of them needs that library where it runs."""
    return {**result, "tasks": [{**task, "candidates": [one for one in task["candidates"] if "library" not in one["choice"]]}
                                for task in result["tasks"]]}


def joined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results of one card and compiler as one, with the tasks that are of today's kernels, of several of one name the last;
    the highest ceilings of all."""
    tasks = {task["name"]: task for result in results for task in result["tasks"]
             if task["generation"] == GENERATIONS[kernels_of(Workload(**task["workload"]))]}
    chains = {task["chain"] for task in tasks.values() if "chain" in task}
    together = {name: one for result in results for name, one in result.get("together", {}).items() if name in chains}
    ceilings = {name: max(result["ceilings"][name] for result in results) for name in results[0]["ceilings"]}
    left = [name for result in results for name in result.get("left_out", [])]
    return {**results[-1], "tasks": list(tasks.values()), "together": together, "ceilings": ceilings, "left_out": left}


def records(result: dict[str, Any], winners: bool = True) -> tuple[list[TuningRecord], list[str]]:
    """(a record of each task, what could not be decided)."""
    made, problems = [], []
    for task in result["tasks"]:
        decision = decided(task)
        if isinstance(decision, str):
            problems.append(f"{task['name']}: {decision}")
        else:
            made.append(record(result, decision, winners))
    return made, problems


def store(result: dict[str, Any], database: str, winners: bool = True) -> None:
    from relaxpack.dist.tuning.store import open_store

    made, problems = records(result, winners)
    with open_store(database) as target:
        added = target.add_all(made)
    print("\n".join([*problems, f"{added} records into {database}"]))


# --- the table --------------------------------------------------------------------------------------------------------

def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each case of each task: microseconds alone and with the neighbour, by the rule, tuned and by torch, and how
    near they are to the roofline."""
    found = []
    for task in result["tasks"]:
        decision = decided(task)
        if isinstance(decision, str):
            continue
        why = left_out(result, decision)
        for index, case in enumerate(task["cases"]):
            roofline = max(case["read_bytes"] / (result["ceilings"]["read_tb_s"] * 1e6),
                           case["flops"] / (result["ceilings"]["gemm_tflop_s"] * 1e6))
            winner = decision.rule if why else decision.winner
            row = {"task": task["name"], "case": case_text(case), "roofline_us": roofline,
                   "improved": bool(winner["number"]), "choice": winner["choice"], "why": why or decision.verdict.why}
            for name, entry in (("rule", decision.rule), ("tuned", winner)):
                row[f"{name}_us"] = median(entry["alone_us"][index])
                row[f"{name}_decides_us"] = median(deciding(task, entry)[index])
            row["torch_us"] = median(task["torch_us"][index]) if "torch_us" in task else None
            row["gain"] = row["rule_decides_us"] / row["tuned_decides_us"]
            if (layer := decision.in_layer) is not None:
                row["layer_us"] = layer
                row["gain"] = decision.rule_us / median(decision.times_us) if row["improved"] else 1.0
            row["share"] = roofline / row["rule_us"]
            found.append(row)
    return found


def condensed(result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run in benchmarks/results: the table's numbers, and of each candidate only how it came out."""
    tasks = {}
    for task in result["tasks"]:
        states = ["failed" if "failure" in one else "wrong" if one.get("error", 1.0) >= 1 else "timed"
                  for one in task["candidates"]]
        decision = decided(task)
        why = decision if isinstance(decision, str) else left_out(result, decision) or decision.verdict.why
        tasks[task["name"]] = {state: states.count(state) for state in ("timed", "failed", "wrong")} | {
            "seconds": task["seconds"], "decision": why}
    kept = [{key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
            for row in rows(result)]
    gain, count = weak_gain(rows(result))
    whole, weak = declared_gains(rows(result))
    return {"what": "Tuning of the CUDA kernels: rule, tuned, torch (cuBLAS, SDPA) and roofline; benchmarks/gpu/tune.py",
            "date": result["created"], "device": result["target"], "compiler": result["compiler"], "torch": result["torch"],
            "cublaslt": result["cublaslt"], "ceilings": result["ceilings"], "left_out": result.get("left_out", []),
            "below_80_percent": {"cases": count, "geometric_mean_gain": round(gain, 3)},
            "declared": {"cases": whole[1], "geometric_mean_gain": round(whole[0], 3),
                         "below_80_percent": {"cases": weak[1], "geometric_mean_gain": round(weak[0], 3)}},
            "together": {name: {"winners": one["winners"], "decision": (verdict := together_wins(one)).why,
                                "ratio": round(verdict.ratio, 4)} for name, one in result.get("together", {}).items()},
            "tasks": tasks, "rows": kept}


def weak_gain(found: Sequence[dict[str, Any]], share: float = 0.8) -> tuple[float, int]:
    """(geometric mean of the gains, count) over the cases where the rule reaches less than `share` of the roofline."""
    weak = [row["gain"] for row in found if row["share"] < share]
    return (geometric_mean(weak), len(weak)) if weak else (1.0, 0)


def declared_gains(found: Sequence[dict[str, Any]]) -> tuple[tuple[float, int], tuple[float, int]]:
    """(geometric mean of the gains, count) over the set by which tuning is judged, and over its cases where the rule reaches
    less than 80 % of the roofline."""
    from benchmarks.gpu.tune_tasks import declared

    names = {job.name for job in declared()}
    own = [row for row in found if row["task"] in names]
    return weak_gain(own, float("inf")), weak_gain(own)


def kind_of(row: dict[str, Any]) -> str:
    """What a row of the table is counted under."""
    name, _, bucket = row["task"].partition("@")
    if "norm" in name:
        return "RMSNorm"
    if "attention" in name:
        return "RoPE, append and attention" if "fused" in name else "decode attention"
    span = next(text for most, text in ((8, "1 to 8"), (64, "16 to 64"), (512, "128 to 512"), (1 << 31, "more"))
                if int(bucket) <= most)
    weight = name.split(".")[2] if name.count(".") == 2 else "bf16"
    return f"matmul {weight}, {span} rows"


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Markdown: by kind, how many cases there are, how many are tuned, and the gains."""
    lines = ["| kernels | cases | tuned | gain of those | below 80 % of the roofline | their gain |",
             "| --- | --- | --- | --- | --- | --- |"]
    for kind in dict.fromkeys(map(kind_of, found)):
        own = [row for row in found if kind_of(row) == kind]
        better = [row["gain"] for row in own if row["improved"]]
        gain, count = weak_gain(own)
        lines.append(f"| {kind} | {len(own)} | {len(better)} | {geometric_mean(better):.2f}x | {count} | {gain:.2f}x |"
                     if better else f"| {kind} | {len(own)} | 0 | | {count} | {gain:.2f}x |")
    return "\n".join(lines)


def table(result: dict[str, Any]) -> str:
    found = rows(result)
    lines = ["| kernel | case | rule, us | tuned, us | torch, us | roofline, us | rule's share | gain in a step | choice |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for row in found:
        choice = ", ".join(f"{key} {value}" for key, value in row["choice"].items()) if row["improved"] else "the rule"
        torch = f"{row['torch_us']:.2f}" if row["torch_us"] else ""
        lines.append(f"| {row['task']} | {row['case']} | {row['rule_us']:.2f} | {row['tuned_us']:.2f} | {torch} | "
                     f"{row['roofline_us']:.2f} | {row['share']:.0%} | {row['gain']:.2f}x | {choice} |")
    gain, count = weak_gain(found)
    slowest = min((row["gain"] for row in found), default=1.0)
    (all_gain, all_count), (weak, weak_count) = declared_gains(found)
    judged = (f"The declared set: {all_gain:.3f}x over {all_count} cases, {weak:.3f}x over the {weak_count} of them below "
              "80 % of the roofline")
    last = (f"{count} cases below 80 % of the roofline: {gain:.2f}x in the geometric mean; the least gain of all "
            f"{len(found)}: {slowest:.2f}x")
    return "\n".join([*lines, "", summary(found), "", last, judged])
