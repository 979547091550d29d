"""`relaxpack tune`: search for faster schedules and keep them in a database."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from relaxpack.cli.options import Location, json_option
from relaxpack.cli.show import print_json
from relaxpack.errors import EnvironmentProblem, UsageError
from relaxpack.model_info import KV_DTYPES
from relaxpack.weight_format import WEIGHTS

if TYPE_CHECKING:
    from relaxpack.target import TargetSpec
    from relaxpack.tuning.measure import Measurer
    from relaxpack.tuning.session import Outcome
    from relaxpack.tuning.tasks import Task

_AS_BUILD = ("weights", "max_batch", "prefill_chunk", "kv_dtype", "level")


@click.command(short_help="Search for faster schedules.")
@click.argument("model")
@click.option("--target", default="cpu", show_default=True, help="cpu (this one), cuda (the GPU here), or one by name.")
@click.option("--db", "location", type=Location(), metavar="LOCATION",
              help="The database, a file or postgresql:// URL. Default: $RELAXPACK_TUNING_DB, or a file of this user's.")
@click.option("--trials", default=256, show_default=True, type=click.IntRange(0), metavar="N",
              help="Candidates to build and time in all; heavy tasks get more of them.")
@click.option("--time", "minutes", type=click.FloatRange(0, min_open=True), metavar="MINUTES",
              help="Stop after so long. The same command goes on later.")
@click.option("--only", metavar="PATTERN", help="Kernels with this in their name; * matches anything.")
@click.option("--bucket", "buckets", multiple=True, metavar="STEP",
              help="Tune for this step: decode:ROWS or prefill:ROWS. Repeatable. Default: decode:1, decode with the "
                   "largest batch, and a full prefill.")
@click.option("--weights", default="as-is", show_default=True,
              type=click.Choice(WEIGHTS), help="As for build.")
@click.option("--max-batch", default=8, show_default=True, type=click.IntRange(1), help="As for build.")
@click.option("--prefill-chunk", default=512, show_default=True, type=click.IntRange(1), help="As for build.")
@click.option("--kv-dtype", type=click.Choice(list(KV_DTYPES)), help="As for build.")
@click.option("-O", "level", type=click.IntRange(0, 3), default=3, show_default=True, help="As for build.")
@click.option("--tracker", metavar="HOST:PORT", help="Run candidates on the machines of this RPC tracker of TVM's.")
@click.option("--key", metavar="KEY", help="Which of the tracker's machines.")
@click.option("--log", "log_path", type=click.Path(path_type=Path, dir_okay=False),
              help="Where trials are noted, so that a stopped job can go on [default: beside the database].")
@click.option("--again", is_flag=True, help="Search anew where a search is complete.")
@click.option("--own-kernels", is_flag=True,
              help="Try no library (cuBLASLt): a bundle that calls one needs it where it runs.")
@click.option("--dry-run", is_flag=True, help="List the tasks, build nothing.")
@json_option
def tune(model: str, target: str, location: str | None, trials: int, minutes: float | None, only: str | None,
         buckets: tuple[str, ...], tracker: str | None, key: str | None, log_path: Path | None, again: bool,
         own_kernels: bool, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Search for faster schedules of the kernels of MODEL on this machine (or those of a tracker), and store the winners.
    A candidate counts only if its numbers are right, and replaces another only if it is faster beyond the noise. For a GPU,
    run it where the GPU and a compiler are; of a checkpoint only the shapes are read.

    \b
    Examples:
      relaxpack tune smollm2 --trials 400
      relaxpack tune smollm2 --only decode --bucket decode:1 --time 10
      relaxpack tune ./Llama-3.2-1B --tracker 10.0.0.5:9190 --key epyc
      relaxpack tune ./Llama-3.2-1B --target cuda --bucket decode:1 --bucket decode:32 --time 10
      relaxpack build smollm2 -o smol.bundle --db ~/.local/share/relaxpack/tuning.sqlite
    """
    from relaxpack.compile import BuildOptions
    from relaxpack.target import parse_target
    from relaxpack.tuning.tasks import extract_tasks, parse_step, without_libraries

    if (tracker is None) != (key is None):
        raise UsageError("--tracker and --key belong together: --tracker HOST:PORT --key KEY")
    steps = [parse_step(text) for text in buckets]
    spec = parse_target(target)
    measurer = None if dry_run else _measurer(spec, tracker, key)     # first: a place that cannot measure shows now
    try:
        tasks = extract_tasks(model, spec, BuildOptions(**options), steps, only)
        tasks = without_libraries(tasks) if own_kernels else tasks
        if not tasks:
            raise UsageError(f"nothing of {model} can be tuned for {spec.name} at these steps")
        if measurer is None:
            return _list(tasks, as_json)
        outcomes, where = _run(tasks, spec, measurer, location, log_path, again, trials, minutes, as_json)
    finally:
        if measurer is not None:
            measurer.close()
    if as_json:
        print_json({"target": spec.name, "database": where, "tasks": [outcome.to_json() for outcome in outcomes]})
    else:
        click.echo(f"Next: {_build_command(model, where)}", err=True)


def _build_command(model: str, database: str) -> str:
    """A build with the records; it repeats the options that were given here and that a build has too."""
    context = click.get_current_context()
    given = [word for parameter in context.command.params
             if parameter.name in (*_AS_BUILD, "target")
             and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
             for word in (parameter.opts[0], str(context.params[parameter.name]))]
    return shlex.join(["relaxpack", "build", model, "-o", "NEW_BUNDLE", *given, "--db", database])


def _run(tasks: Sequence[Task], spec: TargetSpec, measurer: Measurer, location: str | None, log_path: Path | None,
         again: bool, trials: int, minutes: float | None, as_json: bool) -> tuple[list[Outcome], str]:
    from relaxpack.cli.tune_table import TuneTable
    from relaxpack.dist.tuning.store import open_store
    from relaxpack.env import tuning_database
    from relaxpack.fingerprint import compiler_fingerprint, target_fingerprint
    from relaxpack.tuning.session import Limits, TuningSession
    from relaxpack.tuning.trial_log import TrialLog

    location = location or tuning_database()
    target, compiler = target_fingerprint(spec), compiler_fingerprint(spec.kind)
    with open_store(location) as store:
        log = TrialLog(log_path or _beside(location))
        table = TuneTable(f"Tuning for {spec.name} into {store.location}", tasks, quiet=as_json)
        limits = Limits(trials, minutes * 60 if minutes else float("inf"))
        session = TuningSession(tasks, spec, target, compiler, measurer, store, log, limits, table)
        if again:
            for task in tasks:
                log.forget(session.key(task))
        with table:
            return session.run(), store.location


def _measurer(spec: TargetSpec, tracker: str | None, key: str | None) -> Measurer:
    from relaxpack.tuning.measure import LocalMeasurer

    if tracker is not None and key is not None:
        from relaxpack.tuning.remote import RemoteMeasurer

        return RemoteMeasurer(spec, tracker, key)
    if spec.kind == "cuda":
        return _gpu_measurer(spec)
    from relaxpack.target import host_cpu_features

    if missing := sorted(set(spec.features) - set(host_cpu_features())):
        raise EnvironmentProblem(f"tuning for {spec.name} times kernels here, and this CPU has no "
                                 f"{', '.join(missing)}; name machines that have it with --tracker and --key")
    return LocalMeasurer(spec)


def _gpu_measurer(spec: TargetSpec) -> Measurer:
    """Only where the GPU is: its facts are part of a record's key."""
    from relaxpack.fingerprint import target_fingerprint

    try:
        target_fingerprint(spec)
    except EnvironmentProblem as error:
        raise EnvironmentProblem(f"tuning for {spec.name} times kernels on that GPU: {error}; on a machine with one and a "
                                 "compiler run this command there, else build the candidates with `python -m "
                                 "benchmarks.gpu.tune prepare FOLDER` and time them there with its `run` (docs/tuning.md); "
                                 "--dry-run lists the tasks") from None
    from relaxpack.tuning.cuda_measure import CudaMeasurer

    return CudaMeasurer(spec)


def _beside(location: str) -> Path:
    """The log of trials: beside a file, in the default database's folder for a server."""
    from relaxpack.dist.tuning.engine import is_postgresql
    from relaxpack.env import tuning_database

    if not is_postgresql(location):
        return Path(location + ".trials.jsonl")
    default = tuning_database()
    return Path("tuning.trials.jsonl" if is_postgresql(default) else default + ".trials.jsonl")


def _list(tasks: Sequence[Task], as_json: bool) -> None:
    from relaxpack.cli.show import console, table

    if as_json:
        return print_json([{"task": task.name, "shape": task.shape, "weight": task.weight, "roofline_us": task.roofline_us,
                            "choices": task.part.space.size() if task.part else None, "calls": task.calls}
                           for task in tasks])
    console().print(table("Tasks", ("task", "shape", "weight", "roofline, µs", "choices", "calls"), [
        (task.name, task.shape, f"{task.weight:.1%}", f"{task.roofline_us:.1f}",
         str(task.part.space.size()) if task.part else "search",
         ", ".join(f"{count} in {step}" for step, count in task.calls.items())) for task in tasks]))
