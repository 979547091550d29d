"""`relaxpack build`: checkpoint in, bundle out."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relaxpack.cli.options import Location
from relaxpack.cli.signals import ENDING, stoppable
from relaxpack.errors import UsageError
from relaxpack.explain.pass_notes import NOTES
from relaxpack.model_info import KV_DTYPES
from relaxpack.passes.config import ON_REQUEST, OPTIONAL
from relaxpack.weight_format import ACTIVATIONS, WEIGHTS

if TYPE_CHECKING:
    from relaxpack.dist.host import Host
    from relaxpack.dist.manifest import TargetEntry


class _Build(click.Command):
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The passes that --enable and --disable name."""
        with formatter.section("Passes on request (--enable)"):
            formatter.write_dl([(name, f"{NOTES[name].removesuffix(' (on request)')}; needs {needs}")
                                for name, needs in ON_REQUEST.items()])
        with formatter.section("Passes that may be left out (--disable), by the level from which on they run"):
            formatter.write_dl([(f"-O{level}", ", ".join(name for name, since in OPTIONAL.items() if since == level))
                                for level in sorted(set(OPTIONAL.values()))])


@click.command(cls=_Build)
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path),
              help="The bundle to write: a folder, or a single file if the name ends in .rpk.")
@click.option("--target", "targets", multiple=True, default=("cpu",), show_default=True, metavar="TARGET",
              help="cpu (this one), cpu:x86-64-v3, cpu:x86-64-v4, cuda (the GPU here) or cuda:sm_XX. Repeatable: a bundle "
                   "may hold several, and the runtime picks.")
@click.option("--weights", default="as-is", show_default=True,
              type=click.Choice(WEIGHTS),
              help="How weights are stored; q4 (groups of 32), q4-128 (groups of 128), q8 and fp8 (float8 e4m3) keep what "
                   "has that many bits or fewer.")
@click.option("--max-context", type=click.IntRange(2), help="Tokens a sequence may have [default: the model's].")
@click.option("--max-batch", default=8, show_default=True, type=click.IntRange(1), help="Sequences a step may have.")
@click.option("--prefill-chunk", default=512, show_default=True, type=click.IntRange(1),
              help="Prompt tokens computed in one step.")
@click.option("--page-size", default=16, show_default=True, type=click.IntRange(1), help="Tokens of a KV-cache page.")
@click.option("--dtype", "activation_dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
              help="dtype of activations [default: float32 on a CPU, bfloat16 on a GPU].")
@click.option("--activations", type=click.Choice(ACTIVATIONS), default="as-is", show_default=True,
              help="What matmuls of fp8 weights and many rows round activations to on cuda:sm_90a: fp8 is faster and less "
                   "exact; as-is does what the checkpoint's scheme says.")
@click.option("--kv-dtype", type=click.Choice(list(KV_DTYPES)),
              help="dtype of the KV cache; fp8 (float8 e4m3) has room for twice the tokens of a 16-bit one [default: on a "
                   "CPU float16 (float32 for f32 weights), on a GPU the activations'].")
@click.option("-O", "level", type=click.IntRange(0, 3), default=3, show_default=True,
              help="Which optional passes run: 0 none, 1 folding and memory, 2 fusion, 3 all.")
@click.option("--disable", "disabled", multiple=True, metavar="PASS", help="Leave an optional pass out. Repeatable.")
@click.option("--enable", "enabled", multiple=True, metavar="PASS",
              help="Run a pass that runs on request alone, see below. Repeatable.")
@click.option("--ignore-config-key", "ignored", multiple=True, metavar="KEY",
              help="Accept an unknown config key unread. Repeatable.")
@click.option("--embeddings", "embeddings", flag_value="also",
              help="Also build the function that embeddings need (/v1/embeddings, LLM.embed).")
@click.option("--embeddings-only", "embeddings", flag_value="only",
              help="Build nothing else: no text generation, no LM head.")
@click.option("--pretokenizer", help="How a GGUF's tokenizer splits text, where the file does not say.")
@click.option("--db", "databases", type=Location(), multiple=True, metavar="LOCATION",
              help="Use tuning records of this database: a file, a URL, or seed (comes with relaxpack). Repeatable.")
@click.option("--gpu", "gpus", multiple=True, metavar="NAME",
              help="Whose tuning records, for a GPU that is not in this machine: its name or a part of it, e.g. H200.")
@click.option("--dump", type=click.Path(path_type=Path, file_okay=False), help="Write the IR after each phase here.")
@click.option("--timing", is_flag=True, help="Print what each pass took and what it left of the module.")
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON on stdout.")
def build(model: str, output: Path, targets: tuple[str, ...], dump: Path | None, force: bool, as_json: bool, timing: bool,
          disabled: tuple[str, ...], enabled: tuple[str, ...], ignored: tuple[str, ...], embeddings: str | None,
          databases: tuple[str, ...], gpus: tuple[str, ...], **options: Any) -> None:
    """Build a bundle of MODEL: a Hugging Face folder, a .gguf file, or the name smollm2.

    \b
    relaxpack build smollm2 -o smol.bundle
    relaxpack build ./Llama-3.1-8B -o llama.bundle --target cpu --target cuda:sm_90a --max-batch 64
    relaxpack build ./Llama-3.1-8B -o llama.bundle --target cuda:sm_90a --weights fp8 --activations fp8
    relaxpack build ./Qwen3-Embedding-0.6B -o embedder.bundle --embeddings-only
    relaxpack build smollm2 -o smol.bundle --db seed --db postgresql://team@db.example/tuning
    relaxpack build ./Llama-3.1-8B -o llama.bundle --target cuda:sm_90a --db seed --gpu "NVIDIA H200"
    """
    from relaxpack.cli.progress import StageBars
    from relaxpack.compile import BuildOptions, build_bundle

    if len(gpus) > 1:
        raise UsageError(f"--gpu names one GPU, got {' and '.join(map(repr, gpus))}: make a bundle for each")
    chosen = BuildOptions(disabled_passes=frozenset(disabled), enabled_passes=frozenset(enabled), ignore_config_keys=ignored,
                          embeddings=embeddings or "none", **options)
    with stoppable((signal.SIGINT, *ENDING)) as check, StageBars(check, quiet=as_json) as bars:
        report = build_bundle(model, output, targets, chosen, force=force, dump=dump, progress=bars,
                              databases=databases, gpu=gpus[0] if gpus else None)
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    if timing:
        _print_timing(report.passes)
    if as_json:
        json.dump(report.to_json(), sys.stdout)
        sys.stdout.write("\n")
    else:
        _print_summary(report)


def _print_timing(passes: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Passes", title_justify="left")
    for column in ("phase", "pass", "ms", "bindings", "PrimFuncs"):
        table.add_column(column, justify="left" if column in ("phase", "pass") else "right")
    for p in passes:
        table.add_row(p["phase"], p["name"], f"{p['seconds'] * 1e3:.0f}", str(sum(p["bindings"].values())),
                      str(p["prim_funcs"]))
    Console(stderr=True).print(table)


def _print_summary(report: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True)
    names = ", ".join(target.name for target in report.targets)
    table = Table(title=f"{report.path}: {report.manifest.model_info.name} for {names}", title_justify="left")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("what")
    several = len(report.targets) > 1
    what = {"library": "\n".join(f"{f'{t.name}: ' if several else ''}{t.library_bytes / 1e6:.1f} MB of code, "
                                 f"{t.kernel_text()}" for t in report.targets),
            "weights": f"{report.params_bytes / 1e6:.1f} MB: {report.formats_text()}" + _shared_text(report),
            "compile": ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in _phase_seconds(report).items())}
    for stage, seconds in report.seconds.items():
        table.add_row(stage, f"{seconds:.1f}", what.get(stage, ""))
    table.add_row("total", f"{sum(report.seconds.values()):.1f}", "", style="bold")
    console.print(table)
    path = shlex.quote(str(report.path))
    if report.manifest.targets[0].functions == ("embed",):
        next_step = f"relaxpack serve {path}"
    else:
        next_step = f"relaxpack chat {path}" if report.can_chat else f"relaxpack generate {path} --raw \"Once upon a time\""
    console.print(f"Next: {next_step}{_elsewhere(report.manifest.targets)}", highlight=False, markup=False, soft_wrap=True)


def _elsewhere(targets: Sequence[TargetEntry], host: Host | None = None) -> str:
    """Where a bundle runs that this machine can build but not run."""
    from relaxpack.dist.compat import choose_target
    from relaxpack.dist.host import detect_host

    if choose_target(targets, host or detect_host()) is not None:
        return ""
    return f", on a machine for {' or '.join(entry.target.name for entry in targets)}"


def _phase_seconds(report: Any) -> dict[str, float]:
    """Over all targets."""
    sums: dict[str, float] = {}
    for phase in report.phases:
        sums[phase["phase"]] = sums.get(phase["phase"], 0.0) + phase["seconds"]
    return sums


def _shared_text(report: Any) -> str:
    shared = sum(target.params_bytes - target.own_params_bytes for target in report.targets)
    return f"\n{shared / 1e6:.1f} MB more are shared by targets" if shared else ""
