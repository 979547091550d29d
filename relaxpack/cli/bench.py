"""`relaxpack bench serve` and `relaxpack bench latency`: measure a server under load, or a bundle by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from relaxpack.cli.options import bundle_argument, device_option, existing_bundle, json_option
from relaxpack.errors import RelaxpackError, UsageError

_picture_option = click.option("--svg", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
                               help="Draw the result.")
_out_option = click.option("--out", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
                           help="Write the JSON document to a file too.")


@click.group(short_help="Measure latency and throughput.")
def bench() -> None:
    """Measure a server under load, or a bundle by itself."""


@bench.command(short_help="Load a server, or one started for a bundle.")
@click.argument("target", metavar="URL|BUNDLE")
@click.option("--requests", "-r", type=click.IntRange(1), default=64, show_default=True, metavar="N")
@click.option("--concurrency", "-c", type=click.IntRange(1), metavar="N", help="Closed loop: so many at once. Default: 8.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), metavar="R",
              help="Open loop: Poisson arrivals, R a second, whatever the server does.")
@click.option("--prompt-tokens", type=click.IntRange(3), metavar="N", help="About so many; default: as in ShareGPT.")
@click.option("--output-tokens", type=click.IntRange(1), metavar="N", help="Exactly so many; default: as in ShareGPT.")
@click.option("--max-context", type=click.IntRange(16), default=2048, show_default=True, metavar="N",
              help="Longer requests are cut to it; a relaxpack server's own limit counts too.")
@click.option("--shared-prefix", type=click.IntRange(0), default=0, metavar="N",
              help="Tokens that requests of a group share.")
@click.option("--prefix-groups", type=click.IntRange(1), default=4, show_default=True, metavar="N")
@click.option("--share", type=click.FloatRange(0, 1), default=1.0, show_default=True, metavar="S",
              help="Of requests with a shared prefix.")
@click.option("--slo-ttft", type=float, default=1000.0, show_default=True, metavar="MS",
              help="A good request's first token comes within this.")
@click.option("--slo-tpot", type=float, default=100.0, show_default=True, metavar="MS",
              help="And each further one, on average, within this.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--model", metavar="NAME", help="Of the server; default: its first.")
@click.option("--stop-at-end-token", is_flag=True, help="Let the model end its answers (ignore_eos is not sent).")
@_picture_option
@_out_option
@json_option
def serve(target: str, requests: int, concurrency: int | None, rate: float | None, slo_ttft: float, slo_tpot: float,
          model: str | None, stop_at_end_token: bool, svg: Path | None, out: Path | None, as_json: bool,
          **mix: Any) -> None:
    """Send many requests to the server at URL, or to one started for BUNDLE (key: RELAXPACK_API_KEY)."""
    from rich.console import Console
    from rich.progress import Progress

    from relaxpack.bench.client import LoadClient
    from relaxpack.bench.load import Run, run_load, served_bundle
    from relaxpack.bench.report import ServiceLevel, summary
    from relaxpack.bench.workload import Workload
    from relaxpack.env import api_key

    if rate is not None and concurrency is not None:
        raise UsageError("--rate is an open loop and --concurrency a closed one: give one of them")
    workload = Workload(requests, rate=rate, concurrency=None if rate is not None else concurrency or 8,
                        max_tokens=mix.pop("max_context"), **mix)
    extra = {"temperature": 0.0} if stop_at_end_token else {"temperature": 0.0, "ignore_eos": True}

    def measure(url: str) -> Run:
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
            task = bar.add_task("requests", total=requests)
            client = LoadClient(url, model=model, api_key=api_key(), extra=extra)
            return run_load(client, workload, progress=lambda done: bar.update(task, completed=done))
    if target.startswith(("http://", "https://")):
        run = measure(target)
    else:
        with served_bundle(existing_bundle(target)) as url:
            run = measure(url)
    report = summary(run, ServiceLevel(slo_ttft / 1000, slo_tpot / 1000))
    if svg is not None:
        svg.write_text(_load_picture(run, report), encoding="utf-8")
    _give(report, out, as_json, _load_table)
    if report["failed"]:
        raise RelaxpackError(f"{report['failed']} of {report['requests']} requests failed: {report['errors'][0]}")


@bench.command(short_help="Time a bundle in this process, without HTTP.")
@bundle_argument
@click.option("--batch", default="1,2,4,8", show_default=True, metavar="N,N", help="Sequences at once.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True, metavar="N")
@click.option("--output-tokens", type=click.IntRange(1), default=64, show_default=True, metavar="N")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="The best one counts.")
@device_option
@_picture_option
@_out_option
@json_option
def latency(bundle: str, batch: str, prompt_tokens: int, output_tokens: int, runs: int, device: str | None, svg: Path | None,
            out: Path | None, as_json: bool) -> None:
    """Time first and further tokens of BUNDLE in this process, without HTTP."""
    existing_bundle(bundle)
    sizes = [int(part) for part in batch.split(",") if part.strip().isdigit() and int(part) > 0]
    if not sizes or len(sizes) != len(batch.split(",")):
        raise UsageError(f"--batch {batch!r}: expected sizes like 1,2,4,8")

    from relaxpack.bench.latency import LatencyCase, latency_report
    from relaxpack.cli.progress import counting

    cases = [LatencyCase(size, prompt_tokens, output_tokens) for size in sizes]
    with counting("weights to the GPU", quiet=as_json, transfer=True) as loading:
        report = latency_report(bundle, cases, runs=runs, device=device, loading=loading,
                                progress=lambda case: click.echo(f"batch of {case.batch} ...", err=True))
    if svg is not None:
        svg.write_text(_latency_picture(report), encoding="utf-8")
    _give(report, out, as_json, _latency_table)


def _give(report: dict[str, Any], out: Path | None, as_json: bool, show: Any) -> None:
    if out is not None:
        out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        show(report)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:.0f}"


def _load_table(report: dict[str, Any]) -> None:
    from relaxpack.cli.show import console, table

    rows = [[name, *(_ms(report[key][column]) for column in ("mean", "p50", "p95", "p99", "max"))]
            for name, key in (("time to first token", "time_to_first_token"), ("between tokens", "inter_token_latency"),
                              ("time per token", "time_per_token"), ("whole request", "request_latency")) if report[key]]
    console().print(table(f"{report['model']}: {report['requests']} requests in {report['seconds']:.1f} s",
                          ["ms", "mean", "p50", "p95", "p99", "max"], rows))
    cached = report["cached_tokens"] / report["prompt_tokens"] if report["prompt_tokens"] else 0.0
    facts = [f"{report['output_tokens_per_second']:.1f} output tokens/s",
             f"{report['total_tokens_per_second']:.1f} with prompts ({cached:.0%} of them cached)",
             f"{report['requests_per_second']:.2f} requests/s",
             f"{report['goodput_requests_per_second']:.2f} of them good ({report['met_service_level']:.0%})"]
    console().print(", ".join(facts))


def _latency_table(report: dict[str, Any]) -> None:
    from relaxpack.cli.show import console, table

    rows = [[str(r["batch"]), _ms(r["time_to_first_token"]["p50"]),
             *(_ms(r["inter_token_latency"][p]) if r["inter_token_latency"] else "-" for p in ("p50", "p95", "p99")),
             f"{r['prefill_tokens_per_second']:.0f}", f"{r['decode_tokens_per_second']:.1f}", *_step_cells(r)]
            for r in report["results"]]
    first = report["results"][0]
    title = (f"{report['model']}: {first['prompt_tokens']} prompt and {first['output_tokens']} output tokens, best of "
             f"{report['runs']}")
    console().print(table(title, ["batch", "first token ms", "between p50", "p95", "p99", "prefill tok/s", "decode tok/s",
                                  "launches", "of bandwidth"], rows))


def _step_cells(result: dict[str, Any]) -> list[str]:
    step = result.get("step")
    return ["-", "-"] if step is None else [str(step["launches"]), f"{step['share_of_bandwidth']:.0%}"]


def _load_picture(run: Any, report: dict[str, Any]) -> str:
    from relaxpack.bench.picture import Panel, distribution, draw
    from relaxpack.bench.report import gaps

    good = [s for s in run.samples if s.error is None and s.first is not None]
    per_second: dict[int, int] = {}
    for sample in good:
        for at in sample.pieces:
            per_second[int(at)] = per_second.get(int(at), 0) + 1
    flow = [(second + 0.5, float(per_second.get(second, 0))) for second in range(max(per_second, default=0) + 1)]
    panels = [distribution("Time to first token", [s.first - s.due for s in good]),
              distribution("Between tokens", [gap for s in good for gap in gaps(s)]),
              distribution("Whole request", [s.last - s.due for s in good], "s", 1.0),
              Panel("Pieces of text each second", "s", "pieces/s", flow)]
    kind = f"{run.workload.rate:g} arrivals/s" if run.workload.rate else f"{run.workload.concurrency} at once"
    facts = (f"{report['requests']} requests, {kind}: {report['output_tokens_per_second']:.1f} output tokens/s, "
             f"{report['goodput_requests_per_second']:.2f} good requests/s")
    return draw(f"{report['model']} under load", facts, panels)


def _latency_picture(report: dict[str, Any]) -> str:
    from relaxpack.bench.picture import Panel, draw

    rows = report["results"]
    with_gaps = [r for r in rows if r["inter_token_latency"]]
    panels = [Panel("Decode tokens per second", "batch", "tokens/s",
                    [(r["batch"], r["decode_tokens_per_second"]) for r in rows]),
              Panel("Between tokens, median", "batch", "ms",
                    [(r["batch"], r["inter_token_latency"]["p50"] * 1000) for r in with_gaps])]
    facts = f"{rows[0]['prompt_tokens']} prompt and {rows[0]['output_tokens']} output tokens"
    return draw(f"{report['model']} by batch size", facts, panels)
