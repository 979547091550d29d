"""One visit to a GPU machine: every question that only a GPU can answer, in one call of at most nine minutes.

    python benchmarks/gpu/visit.py prepare FOLDER              # where code is built; no GPU, no driver
    python benchmarks/gpu/visit.py run FOLDER --out VISIT.json # where the GPU is; no compiler, no network

Each section runs in a process of its own with a limit, in the order of how much it matters; the results are written after
every one, so that a visit that is cut short keeps what it has. A section that fails says so and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODEL = "llama-3.1-8b"
SMALL = "llama-3.2-1b"
OTHERS = ("qwen2.5-7b", "qwen3-8b")


@dataclass(frozen=True)
class Section:
    """`command` gives what to run for a folder and the file that the section's JSON may go to; else it is what it prints.
    `must_say`: without these words its output is no success."""

    name: str
    question: str
    limit: float           # seconds
    command: Callable[[Path, Path], list[str]]
    must_say: str = ""


def _python(*arguments: object) -> list[str]:
    return [sys.executable, *map(str, arguments)]


def _measure(function: str) -> Callable[[Path, Path], list[str]]:
    code = (f"import json, sys; from pathlib import Path; sys.path.insert(0, {str(HERE)!r}); import visit_sections as s; "
            f"json.dump(s.{function}(Path(sys.argv[1])), open(sys.argv[2], 'w'))")
    return lambda folder, out: _python("-c", code, folder / "large.bundle", out)


def _sanitized(tool: str) -> Callable[[Path, Path], list[str]]:
    return lambda folder, out: ["compute-sanitizer", "--tool", tool, *_python(
        "-m", "relaxpack", "generate", folder / "smollm2.bundle", "--prompt-ids", "5,6,7,8", "--raw", "-n", "3",
        "--device", "cuda")]


def _timeline(model: str) -> Callable[[Path, Path], list[str]]:
    return lambda folder, out: _python(HERE / "timeline.py", folder, "--model", model, "--batches", "1,8,32", "--out", out)


def _transformers(model: str) -> Callable[[Path, Path], list[str]]:
    return lambda folder, out: _python(HERE / "peer_transformers.py", "--model", model, "--batches", "1,8,32", "--out", out)


def _first_token(folder: Path, out: Path) -> list[str]:
    return _python("-m", "relaxpack", "generate", folder / "large.bundle", "--prompt-ids", "5,6,7,8", "--raw", "-n", "1",
                   "--device", "cuda", "--json")


SECTIONS = (
    Section("environment", "which machine is it", 30, lambda folder, out: _python(
        "-m", "relaxpack", "doctor", "--json")),
    Section("gpu_tests", "do all tests marked gpu pass, one whole bundle and cuBLASLt among them", 90, lambda folder, out:
            _python("-m", "pytest", ROOT / "tests" / "gpu", "-m", "gpu", "-q", "-p", "no:cacheprovider"), " passed"),
    Section("canaries", "does the bundle that was built without a GPU answer as the CPU said", 30, lambda folder, out:
            _python("-m", "relaxpack", "verify", folder / "smollm2.bundle", "--device", "cuda", "--json")),
    Section("smollm2", "logits, captured against eager, crowd against alone on real weights", 40, lambda folder, out:
            _python(HERE / "check_bundle.py", "check", folder / "smollm2.bundle", folder / "smollm2.npz", out)),
    Section("large_bundle", "a bundle in true size from a seed", 60, lambda folder, out: _python(
        HERE / "random_bundle.py", folder / f"{MODEL}-bf16", folder / "large.bundle")),
    Section("first_token", "process start to first token, files in the page cache", 30, _first_token),
    Section("loading", "upload, plan against driver, capture of all buckets", 30, _measure("loading")),
    Section("tables", "decode and prefill with graphs and without", 60, _measure("tables")),
    Section("latency", "launches, gap and share of the measured bandwidth of a step", 60, lambda folder, out: _python(
        "-m", "relaxpack", "bench", "latency", folder / "large.bundle", "--batch", "1,8,32,128", "--prompt-tokens", "512",
        "--output-tokens", "64", "--device", "cuda", "--json")),
    Section("upload", "GB/s of weights by chunk size", 40, _measure("upload_rates")),
    Section("memcheck", "does compute-sanitizer find an access that is out of bounds", 40, _sanitized("memcheck"),
            "ERROR SUMMARY: 0 errors"),
    Section("racecheck", "does compute-sanitizer find a race", 100, _sanitized("racecheck"), "RACECHECK SUMMARY: 0 hazards"),
    Section("explain", "does a report with measured kernels come out", 30, lambda folder, out: _python(
        "-m", "relaxpack", "explain", folder / "smollm2.bundle", "--measure", "--html", folder / "explain.html"), " kB"),
    Section("against_transformers", "logits and greedy tokens of models in true shapes", 70, lambda folder, out: _python(
        HERE / "against_transformers.py", folder, "--models", ",".join((SMALL, MODEL, *OTHERS)), "--out", out)),
    Section(f"timeline_{SMALL}", "when each kernel of a captured step runs", 40, _timeline(SMALL)),
    Section(f"timeline_{MODEL}", "when each kernel of a captured step runs", 40, _timeline(MODEL)),
    Section(f"transformers_{SMALL}", "the second peer on the same machine", 50, _transformers(SMALL)),
    Section(f"transformers_{MODEL}", "the second peer on the same machine", 50, _transformers(MODEL)),
)


def run(folder: Path, out: Path, minutes: float, only: set[str] | None = None,
        sections: tuple[Section, ...] = SECTIONS) -> dict[str, Any]:
    """Run the sections and write `out` after each. Never raises for what a section does."""
    begin = time.monotonic()
    results: dict[str, Any] = {"minutes_allowed": minutes, "sections": {}}
    for section in sections:
        if only is not None and section.name not in only:
            continue
        left = minutes * 60 - (time.monotonic() - begin)
        results["sections"][section.name] = {"question": section.question,
                                             **(_run_one(section, folder, min(section.limit, left)) if left > 5 else
                                                {"ok": False, "error": "no time was left"})}
        results["seconds"] = round(time.monotonic() - begin, 1)
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = out.with_name(f"{out.name}.partial")
        # Where things lie on that machine is nobody's business.
        beside.write_text(json.dumps(results, indent=1).replace(f"{folder}/", "").replace(f"{ROOT}/", "") + "\n")
        beside.rename(out)
        found = results["sections"][section.name]
        print(f"{results['seconds']:7.1f} s  {'ok ' if found['ok'] else 'BAD'} {section.name}", flush=True)
    return results


def _run_one(section: Section, folder: Path, limit: float) -> dict[str, Any]:
    made = folder / f"visit-{section.name}.json"
    made.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                   "RELAXPACK_GPU_BUNDLE": str(folder / "smollm2.bundle"), "RELAXPACK_GPU_KERNELS": str(folder / "kernels"),
                   "RELAXPACK_GPU_ATTENTION": str(folder / "attention")}
    begin = time.monotonic()
    try:
        done = subprocess.run(section.command(folder, made), cwd=ROOT, env=environment, capture_output=True, text=True,
                              timeout=limit)
        code, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        code, output, errors = 124, *(_text(part) for part in (expired.stdout, expired.stderr))
    except OSError as problem:      # a tool that this machine lacks
        code, output, errors = 127, "", str(problem)
    result: dict[str, Any] = {"ok": code == 0 and section.must_say in output + errors,
                              "seconds": round(time.monotonic() - begin, 2)}
    if (answer := _answer(made, output)) is not None:
        result["result"] = answer
    if answer is None or not result["ok"]:
        result |= {"code": code, "output": output[-3000:], "error": errors[-3000:]}
    return result


def _text(part: bytes | str | None) -> str:
    return part.decode(errors="replace") if isinstance(part, bytes) else part or ""


def _answer(made: Path, output: str) -> Any:
    """The JSON of a section: the file it was given, else what it printed. None where there is none."""
    for text in (made.read_text() if made.exists() else "", output):
        try:
            return json.loads(text)
        except ValueError:
            continue
    return None


def prepare(folder: Path, max_batch: int = 128) -> None:
    """Everything that a machine without a compiler needs. Takes minutes; weights in true size are made there."""
    folder.mkdir(parents=True, exist_ok=True)

    def bundle(name: str, *options: object) -> list[str]:
        return _python("-m", "relaxpack", "build", "smollm2", "-o", folder / name, "--force", *options)

    steps: dict[str, list[str]] = {
        "smollm2.bundle": bundle("smollm2.bundle", "--target", "cuda:sm_90a", "--max-context", 2048, "--max-batch", 32),
        "smollm2-f32.bundle": bundle("smollm2-f32.bundle", "--weights", "f32", "--max-context", 1024),
        "smollm2.npz": _python(HERE / "check_bundle.py", "reference", folder / "smollm2-f32.bundle", folder / "smollm2.npz"),
        "kernels": _python("-m", "benchmarks.gpu.kernels_matmul", "build", folder / "kernels", "check", "chain"),
        "kernels/norms": _python("-m", "benchmarks.gpu.norm_fusion", "build", folder / "kernels" / "norms"),
        "kernels/quantised": _python("-m", "benchmarks.gpu.quantised_matmul", "build", folder / "kernels" / "quantised"),
        "kernels/fp8": _python("-m", "benchmarks.gpu.fp8_matmul", "build_checks", folder / "kernels" / "fp8"),
        "attention": _python("-m", "tests.helpers.attention_builds", folder / "attention"),
        f"{SMALL}-bf16.so": _python(HERE / "build_models.py", folder, "--model", SMALL),
        f"{MODEL}-bf16.so": _python(HERE / "build_models.py", folder, "--model", MODEL, "--max-batch", max_batch),
        **{f"{model}-bf16.so": _python(HERE / "build_models.py", folder, "--model", model, "--max-batch", 8, "--max-context",
                                       2048, "--prefill-chunk", 1024) for model in OTHERS},
    }
    for name, command in steps.items():
        print(f"{name} ...", flush=True)
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    shutil.rmtree(folder / "smollm2-f32.bundle")        # its answers are in smollm2.npz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("prepare", help="build what the GPU machine needs")
    first.add_argument("folder", type=Path)
    second = commands.add_parser("run", help="answer the questions on the GPU machine")
    second.add_argument("folder", type=Path)
    second.add_argument("--out", type=Path, required=True)
    second.add_argument("--minutes", type=float, default=9.0)
    second.add_argument("--only", help="names of sections, with commas: " + ", ".join(s.name for s in SECTIONS))
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.folder)
        return
    only = set(args.only.split(",")) if args.only else None
    if unknown := (only or set()) - {section.name for section in SECTIONS}:
        parser.error(f"no section {', '.join(sorted(unknown))}")
    results = run(args.folder.resolve(), args.out.resolve(), args.minutes, only)
    sys.exit(0 if all(section["ok"] for section in results["sections"].values()) else 1)


if __name__ == "__main__":
    main()
