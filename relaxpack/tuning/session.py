"""`TuningSession`: the tasks of a job, one after the other, each: time the untuned kernel, search, check and time, let the
best meet the incumbent in a duel, store the winner. Built from parts that can be replaced: a measurer, a store, a log.

What a trial measures decides what is tried next; what is stored is decided by the duel alone, by the rule of noise: for
kernels of a GPU's decode steps in a chain of whole layers, with the winners so far around it.
"""

from __future__ import annotations

import base64
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from relaxpack import __version__
from relaxpack.errors import EnvironmentProblem
from relaxpack.kernel_generations import for_workload
from relaxpack.schedules.tuning.noise import MIN_PAIRS
from relaxpack.schedules.tuning.search import Search
from relaxpack.schedules.tuning.tuned import as_choice
from relaxpack.target import TargetSpec
from relaxpack.tuning.candidates import families_for
from relaxpack.tuning.chain import CHAIN_FINALISTS, CHAIN_GAIN, CHAIN_ROUNDS
from relaxpack.tuning.duel import chain_facts, decide, in_step
from relaxpack.tuning.measure import ChainMeasurer, Measurer
from relaxpack.tuning.rounds import Rounds, machine_conditions
from relaxpack.tuning.surroundings import choices_around
from relaxpack.tuning.tasks import Task
from relaxpack.tuning.trial_log import TrialLog
from relaxpack.tuning.worker import CandidateFailed
from relaxpack.tuning_record import Check, Facts, Origin, TuningRecord, Workload, digest

FINALISTS = 3
DUEL_ROUNDS = 15
NEAR_ROOFLINE = 0.95     # of it: searching on cannot gain more than noise
MIN_TRIALS = 8           # of a task, where its space has as many
SEED = 0


@dataclass(frozen=True)
class Limits:
    """`trials` and `seconds` of the whole job. `trial_seconds`, `duel_seconds`: how long clean rounds are waited for."""

    trials: int = 256
    seconds: float = float("inf")
    trial_seconds: float = 0.6
    duel_seconds: float = 20.0
    trial_rounds: int = 5


@dataclass
class Outcome:
    """What a task came to. `state`: improved, kept, known, stopped, failed, busy."""

    task: Task
    state: str
    why: str = ""
    untuned_us: float | None = None
    best_us: float | None = None
    trials: int = 0
    failed: int = 0
    record: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"task": self.task.name, "shape": self.task.shape, "weight": self.task.weight, "state": self.state,
                "why": self.why, "untuned_us": self.untuned_us, "best_us": self.best_us,
                "roofline_us": self.task.roofline_us, "trials": self.trials, "failed": self.failed, "record": self.record}


class Observer(Protocol):
    def planned(self, budgets: Mapping[str, int]) -> None: ...
    def started(self, task: Task) -> None: ...
    def trial(self, outcome: Outcome, left: int) -> None: ...
    def finished(self, outcome: Outcome) -> None: ...


class Store(Protocol):
    """The part of `relaxpack.dist.tuning.store.RecordStore` that tuning needs."""

    def lookup(self, workload_hash: str, bucket: int | None, target_hash: str,
               compiler_hash: str) -> TuningRecord | None: ...
    def add(self, record: TuningRecord) -> bool: ...


@dataclass
class TuningSession:
    tasks: Sequence[Task]
    compiled_for: TargetSpec
    target: Facts
    compiler: Facts
    measurer: Measurer
    store: Store
    log: TrialLog
    limits: Limits = field(default_factory=Limits)
    observer: Observer | None = None
    clock: Callable[[], float] = time.monotonic

    def run(self) -> list[Outcome]:
        """Heaviest task first. Ctrl-C and a kill lose at most the trial that is running."""
        end, outcomes = self.clock() + self.limits.seconds, []
        budgets = shares(self.tasks, self.limits.trials)
        if self.observer:
            self.observer.planned(budgets)
        for task in self.tasks:
            if self.observer:
                self.observer.started(task)
            outcome = (Outcome(task, "stopped", "no time left") if self.clock() >= end
                       else self._task(task, budgets[task.name], end))
            outcomes.append(outcome)
            if self.observer:
                self.observer.finished(outcome)
        return outcomes

    def key(self, task: Task) -> dict[str, Any]:
        return {"workload": task.workload.hash, "bucket": task.bucket, "target": dict(self.target),
                "compiler": dict(for_workload(self.compiler, task.workload))}

    def _known(self, workload: Workload, bucket: int | None) -> TuningRecord | None:
        return self.store.lookup(workload.hash, bucket, digest(self.target), digest(for_workload(self.compiler, workload)))

    def _task(self, task: Task, budget: int, end: float) -> Outcome:
        outcome, key = Outcome(task, "failed"), self.key(task)
        known = self._known(task.workload, task.bucket)
        history = self.log.history(key)
        outcome.trials, outcome.failed = len(history.results), history.failures()
        if history.done is not None and known is not None:
            outcome.state, outcome.why, outcome.record = "known", history.done, known.id
            outcome.untuned_us, outcome.best_us = known.baseline_us, known.median_us
            return outcome
        try:
            return self._search(task, outcome, key, known, budget, end)
        except CandidateFailed as error:
            outcome.why = f"the untuned kernel: {error}"
            return outcome
        except EnvironmentProblem as error:
            if task.part is not None:
                raise
            outcome.why = str(error)           # MetaSchedule's packages are missing; our own spaces need none of them
            return outcome

    def _search(self, task: Task, outcome: Outcome, key: Mapping[str, Any], known: TuningRecord | None, budget: int,
                end: float) -> Outcome:
        baseline, _ = self._measure(task, untuned_choice(task))
        outcome.untuned_us = outcome.best_us = baseline
        if task.part is None:
            return self._search_traces(task, outcome, key, known, budget, end)
        search = self._resumed(task, key, budget)
        for _, tried in self.log.history(key).results:
            outcome.best_us = min(outcome.best_us, tried) if tried is not None else outcome.best_us
        near = False
        while not (near := self._is_near(task, outcome)) and self.clock() < end:
            batch = [choice for _ in range(self.measurer.parallel) if (choice := search.propose()) is not None]
            if not batch:
                break
            for parameters, result in zip(batch, self._trials(task, batch), strict=True):
                time_us = result if isinstance(result, float) else None
                search.tell(parameters, time_us)
                self.log.trial(key, parameters, time_us, "" if time_us is not None else str(result))
                outcome.best_us = min(outcome.best_us, time_us) if time_us is not None else outcome.best_us
                outcome.failed += time_us is None
                outcome.trials += 1
                if self.observer:
                    self.observer.trial(outcome, budget - outcome.trials)
        finished = near or self.clock() < end
        count = FINALISTS if task.chain is None else CHAIN_FINALISTS
        finalists = [as_choice(parameters) for parameters in search.best(count)]
        return self._decide(task, outcome, key, known, finalists, finished)

    def _search_traces(self, task: Task, outcome: Outcome, key: Mapping[str, Any], known: TuningRecord | None, budget: int,
                       end: float) -> Outcome:
        """MetaSchedule, whose database beside the log of trials is what it goes on from."""
        from relaxpack.schedules.tuning.metaschedule import best_traces, known_trials, search
        from relaxpack.tvm_records import workload_module

        func = workload_module(task.workload)["main"]
        folder = self.log.path.with_suffix(".metaschedule") / digest(key)[:16]
        outcome.trials = known_trials(folder)

        def try_candidate(module: Any) -> float:
            text = base64.b64encode(module_json(module).encode()).decode()
            outcome.trials += 1
            try:
                time_us, _ = self._measure(task, {"kind": "module", "module": text})
            except CandidateFailed:
                outcome.failed += 1
                raise
            finally:
                if self.observer:
                    self.observer.trial(outcome, budget - outcome.trials)
            outcome.best_us = min(outcome.best_us or time_us, time_us)
            return time_us * 1e-6

        search(func, self.compiled_for, folder, budget, try_candidate,
               lambda: self.clock() >= end or self._is_near(task, outcome), SEED)
        finalists = [{"kind": "trace", "trace": trace} for trace in best_traces(func, folder, FINALISTS)]
        return self._decide(task, outcome, key, known, finalists, self.clock() < end)

    @staticmethod
    def _is_near(task: Task, outcome: Outcome) -> bool:
        """Not beyond it, which only shows that it is too slow: its bandwidth was measured on a busy machine, or the data
        stays in a cache. And not before some trials."""
        assert outcome.best_us is not None
        share = task.roofline_us / outcome.best_us
        return outcome.trials >= MIN_TRIALS and NEAR_ROOFLINE <= share <= 1 / NEAR_ROOFLINE

    def _trials(self, task: Task, batch: Sequence[Mapping[str, Any]]) -> list[float | CandidateFailed]:
        """Microseconds of each, or what went wrong; side by side where there are several machines."""
        def one(parameters: Mapping[str, Any]) -> float | CandidateFailed:
            try:
                return self._measure(task, as_choice(parameters))[0]
            except CandidateFailed as error:
                return error

        if len(batch) == 1:
            return [one(batch[0])]
        with ThreadPoolExecutor(len(batch)) as pool:
            return list(pool.map(one, batch))

    def _resumed(self, task: Task, key: Mapping[str, Any], budget: int) -> Search:
        assert task.part is not None, task.name
        search = Search(task.part.space, budget, SEED)
        for parameters, time_us in self.log.history(key).results:
            search.tell(parameters, time_us)
        return search

    def _measure(self, task: Task, choice: Mapping[str, Any]) -> tuple[float, Check]:
        """Build, check, time: microseconds of a call, from clean rounds where there were any."""
        library = self.measurer.build(task.work, choice)
        try:
            checked = self._check(task, library)
            rounds, = self.measurer.time([library], task.work, task.bucket or 1, SEED, self.limits.trial_rounds,
                                         self.limits.trial_seconds)
        finally:
            self.measurer.discard(library)
        return quick_time(rounds), checked

    def _check(self, task: Task, library: str) -> Check:
        worst, where = self.measurer.check(library, task.work, task.bucket or 1, SEED)
        if not worst <= 1.0:
            raise CandidateFailed(f"wrong numbers: {worst:.3g} times the allowed error ({where})")
        return Check(SEED, worst, 1.0)

    def _decide(self, task: Task, outcome: Outcome, key: Mapping[str, Any], known: TuningRecord | None,
                finalists: Sequence[Mapping[str, Any]], finished: bool) -> Outcome:
        """The duel: incumbent, rule and finalists in turn."""
        rule = untuned_choice(task)
        choices = [dict(known.choice) if known is not None else rule, rule, *map(dict, finalists)]
        libraries: list[str] = []
        try:
            checks = []
            for choice in choices:
                libraries.append(self.measurer.build(task.work, choice))
                checks.append(self._check(task, libraries[-1]))
            around = self._around(task)
            rounds = self._duel(task, libraries, around)
        finally:
            for library in libraries:
                self.measurer.discard(library)
        facts: Facts = {}
        if task.chain is None:
            winner, verdict = decide(rounds, choices[0] == choices[1], task.least_gain)
        else:
            assert outcome.untuned_us is not None
            winner, verdict = decide(rounds, choices[0] == choices[1], 0.0, CHAIN_GAIN)
            calls = task.chain.calls_of(task.work.hash)
            rule_us, own_us = (statistics.median(rounds[index].times_us) for index in (1, winner))
            facts = {"chain": chain_facts(rule_us, own_us, task.chain.function, calls, len(around))}
            rounds = [in_step(one, rounds[1], outcome.untuned_us, calls) for one in rounds]
        kept = rounds[winner].kept()
        if min(verdict.pairs, len(kept)) < MIN_PAIRS:
            outcome.state = "busy"
            outcome.why = f"{verdict.pairs} undisturbed rounds, {MIN_PAIRS} needed: the machine is busy; run again to decide"
            return outcome
        untuned = rounds[1].kept() or rounds[1].times_us
        outcome.untuned_us, outcome.best_us = statistics.median(untuned), statistics.median(kept)
        outcome.why = verdict.why if finalists else "nothing else was tried"
        outcome.state = "improved" if winner else "kept"
        if winner or known is None:
            record = self._record(task, choices[winner], kept, untuned, checks[winner], rounds[winner], outcome, facts)
            self.store.add(record)
            outcome.record = record.id
        else:
            outcome.record = known.id
        if finished:
            self.log.finish(key, f"{outcome.state}: {outcome.why}")
        else:
            outcome.state, outcome.why = "stopped", "no time left; run again to go on"
        return outcome

    def _around(self, task: Task) -> dict[str, dict[str, Any]]:
        if task.chain is None:
            return {}
        return choices_around(task.chain, task.work.hash, families_for(self.compiled_for), self._known)

    def _duel(self, task: Task, libraries: Sequence[str], around: Mapping[str, Mapping[str, Any]]) -> list[Rounds]:
        if task.chain is None:
            return self.measurer.time(libraries, task.work, task.bucket or 1, SEED, DUEL_ROUNDS, self.limits.duel_seconds)
        assert isinstance(self.measurer, ChainMeasurer)          # only tasks for GPUs have chains
        return self.measurer.time_in_chain(libraries, task.work, task.chain, around, SEED, CHAIN_ROUNDS,
                                           self.limits.duel_seconds)

    def _record(self, task: Task, choice: Mapping[str, Any], times_us: Sequence[float], untuned: Sequence[float],
                checked: Check, rounds: Rounds, outcome: Outcome, facts: Facts) -> TuningRecord:
        conditions = {"repeats": len(times_us), "rotated_bytes": rounds.rotated_bytes,
                      "disturbed_rounds": len(rounds.times_us) - len(times_us), **self.measurer.conditions(),
                      **machine_conditions(), **facts,
                      **({"norm": "inside, as in a build"} if task.asked is not None else {})}
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        origin = Origin(created, platform.node(), f"relaxpack {__version__}", outcome.trials)
        return TuningRecord(task.workload, task.bucket, self.target, for_workload(self.compiler, task.workload), choice,
                            tuple(round(t, 4) for t in times_us), conditions, checked, origin,
                            baseline_us=round(statistics.median(untuned), 4))


def untuned_choice(task: Task) -> dict[str, Any]:
    """What a build does without a record."""
    return {"kind": "trace", "trace": [[], []]} if task.part is None else {"kind": "parameters", "parameters": {}}


def module_json(module: Any) -> str:
    import relaxpack.tvm_setup  # noqa: F401
    import tvm

    return str(tvm.ir.save_json(module))


def quick_time(rounds: Rounds) -> float:
    """One number for the search. Without clean rounds the least disturbed one: other load only ever adds."""
    kept = rounds.kept()
    return statistics.median(kept) if len(kept) >= 3 else min(kept or rounds.times_us)


def shares(tasks: Sequence[Task], trials: int) -> dict[str, int]:
    """Trials by weight, some for each where there are enough, at most what there is to try; what that leaves goes to the
    others."""
    sizes = {task.name: task.part.space.size() if task.part is not None else trials for task in tasks}
    least = min(MIN_TRIALS, trials // len(tasks)) if tasks else 0
    given = {task.name: min(sizes[task.name], least) for task in tasks}
    open_tasks = [task for task in tasks if given[task.name] < sizes[task.name]]
    left = trials - sum(given.values())
    while left > 0 and open_tasks:
        total = sum(task.weight for task in open_tasks) or 1.0
        before = left
        for task in open_tasks:
            more = min(sizes[task.name] - given[task.name], max(1, round(before * task.weight / total)), left)
            given[task.name] += more
            left -= more
        open_tasks = [task for task in open_tasks if given[task.name] < sizes[task.name]]
    return given
