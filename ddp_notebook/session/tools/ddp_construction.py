"""`%ddp_wrap`: a model taken through DDP's construction, one stage at a time.

The ranks do what DDP's constructor does, by calling torch's own functions stage by stage. A rank
that died or failed ends the wait for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_notebook.diagnosis.training import construction
from ddp_notebook.errors import CellInterrupted, UsageMistake
from ddp_notebook.model import (
    Diagnosis,
    Finding,
    Ranks,
    Status,
    StepRow,
    StepTable,
    by_value,
    counted,
    format_bytes,
    format_ranks,
    name_ranks,
    said_by,
    them,
)
from ddp_notebook.model.ddp import Fingerprint, RankFailure, WrapStage
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import Answer, Call, Request
from ddp_notebook.session.findings import Found
from ddp_notebook.session.guards import check_group, check_name, idle_ranks
from ddp_notebook.session.interrupts import noted
from ddp_notebook.session.queries import ask
from ddp_notebook.session.record import Record

if TYPE_CHECKING:
    from ddp_notebook.cluster.rank_cluster import RankCluster
    from ddp_notebook.session.findings import LastFindings
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.runs.registry import RunRegistry


@dataclass(frozen=True)
class WrapOptions:
    """The options of `%ddp_wrap`. Raises UsageMistake for values that cannot work.

    `bucket_cap_mb` None is torch's own: 25 MiB, the first bucket 1 MiB. `target` is the
    variable that gets the DDP object; empty: the model's own.
    """

    step: bool = False
    buckets: bool = False
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    target: str = ""

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None and not 0 < self.bucket_cap_mb < 2**20:
            raise UsageMistake(
                f"--bucket-cap-mb must be a size in MiB of more than 0, such as 25, not "
                f"{self.bucket_cap_mb:g}."
            )
        if self.target:
            check_name(self.target)


@dataclass(eq=False)
class DdpConstruction:
    """Takes the models of a session through DDP's construction, one after another."""

    _record: Record
    _pool: RankPool
    _runs: RunRegistry
    _findings: LastFindings
    latest: Wrap | None = None
    """The last model."""

    def wrap(self, name: str, options: WrapOptions) -> Wrap:
        """Take a model through DDP's construction on the ranks; if wrapped, show its buckets.

        Raises UsageMistake before anything is done, CellInterrupted.
        """
        cluster = self._pool.need("%ddp_wrap").cluster
        members = self._runs.idle(None, "%ddp_wrap")
        check_group(self._record.snapshot)
        if not name and options.buckets and self.latest is not None:
            name = self.latest.target
        if not name:
            raise UsageMistake("%ddp_wrap needs the name of a model on the ranks: %ddp_wrap model")
        made = Wrap(cluster, self._record, members, name, options, self._findings.begin)
        if made.begin() and not options.step:
            made.step(WrapStage.REDUCER)
        self.latest = made
        return made


class _Stopped(Exception):
    """A stage failed: the findings, and each rank's state. Never leaves this file."""

    def __init__(self, findings: tuple[Finding, ...], rows: tuple[StepRow, ...]) -> None:
        super().__init__(findings)
        self.findings = findings
        self.rows = rows


class Wrap:
    """The construction of one DDP object. `table` is the latest one to show."""

    def __init__(
        self,
        cluster: RankCluster,
        record: Record,
        ranks: Ranks,
        name: str,
        options: WrapOptions,
        keep: Callable[[Found], None],
    ) -> None:
        """`keep` gets the reason why a stage failed."""
        check_name(name)
        self.name = name
        self.options = options
        self.target = options.target or name
        self.ranks = ranks
        self.stage: WrapStage | None = WrapStage.PARAMETERS_VERIFIED
        """The next stage; None at the end, or after a failed stage."""
        self.done = False
        """True when the variable is a DDP object."""
        self.diagnosis: Diagnosis | None = None
        """Why a stage failed; None if none did."""
        self.table = StepTable(title=name, rows=())
        self._keep = keep
        self._cluster = cluster
        self._record = record
        self._generation = record.snapshot.generation
        self._model = Fingerprint()
        self._details: list[str] = []
        self._request = calls.ModelName(name)
        self._ddp_options = calls.DDPOptions(
            name, options.bucket_cap_mb, options.find_unused_parameters
        )

    # -- going on ----------------------------------------------------------------------

    def begin(self) -> bool:
        """Inspect the variable `name`; False when it is already wrapped, and its buckets are shown.

        Raises UsageMistake when it is not a model on some rank.
        """
        kinds = self._ask(calls.DESCRIBE, self._request)
        if all(description.kind == "ddp" for description in kinds.values()):
            self.done, self.stage = True, None
            known = self._ask(calls.REDUCTION, self._request)
            step = known[self.ranks[0]].steps
            text = f"as DDP noted it in step {step}" if step else "no step yet"
            self._details = list(construction.reduction_lines(known, self.name))
            self._show(WrapStage.BUCKETS, dict.fromkeys(self.ranks, text))
            return False
        why_not = {
            rank: construction.why_not(
                description.kind, description.type, description.problem, self.name
            )
            for rank, description in kinds.items()
        }
        if problems := {rank: why for rank, why in why_not.items() if why}:
            raise UsageMistake(
                f"{self.name} cannot be wrapped ({said_by(problems)}). Make it on all ranks: "
                f"%%ddp, then {self.name} = ..., then %ddp_wrap {self.name}"
            )
        if self.options.buckets:
            raise UsageMistake(
                f"{self.name} is not wrapped yet, so DDP has no buckets for it. "
                f"First: %ddp_wrap {self.name}"
            )
        self._show(WrapStage.PARAMETERS_VERIFIED, {})
        return True

    def step(self, to: WrapStage | None = None) -> StepTable:
        """Pass the next stage, or all up to and with `to`; `table`.

        Raises UsageMistake when there is nothing to step, CellInterrupted, SessionLost.
        """
        again = f"Begin again: %ddp_wrap {self.name}"
        if self.done:
            raise UsageMistake(
                f"{self.target} is wrapped: nothing is left to step. Its buckets: "
                f"%ddp_wrap {self.target} --buckets"
            )
        if self.stage is None:
            raise UsageMistake(f"The wrapping of {self.name} has ended. {again}")
        # When the group is made again, ranks may have new processes, without this model; and those
        # that kept theirs have passed stages by collectives of a group that is gone.
        if self._record.snapshot.generation != self._generation:
            self.stage = None
            raise UsageMistake(f"The process group has been rebuilt since. {again}")
        idle_ranks(self.ranks, "%ddp_wrap", self._record.snapshot)
        first = stage = self.stage
        last = to or first
        if last.number < first.number:
            raise UsageMistake(f"Stage {last} has already passed. The next is {first}: %ddp_step")
        self._details = []
        texts: dict[int, str] = {}
        for stage in tuple(WrapStage)[first.number - 1 : last.number]:
            self._details.append(f"── {construction.place(stage)} ──")
            self.stage = None  # unless this one is passed
            try:
                # torch's own check is a collective: a rank with more parameters would wait in it
                # for the others. And when it goes step by step, cells may have run since the last.
                if stage is WrapStage.PARAMETERS_VERIFIED or self.options.step:
                    self._check_alike(stage)
                texts = self._pass(stage)
            except _Stopped as stop:
                return self._stop(stage, stop)
            self.stage = next(iter(tuple(WrapStage)[stage.number :]), None)
            self.done = self.stage is None
        return self._show(stage, texts)

    def _stop(self, stage: WrapStage, stop: _Stopped) -> StepTable:
        doing = {rank: row.text for row in stop.rows for rank in row.ranks}
        self.diagnosis = Diagnosis(stop.findings, doing, len(self.ranks))
        found = Found(f"%ddp_wrap {self.name}")
        found.take(self.diagnosis)
        self._keep(found)
        self._details.append(self.diagnosis.headline)
        for finding in stop.findings:
            self._details += [*finding.evidence, f"Fix: {finding.remedy}"]
        title = f"{self.name}: {construction.place(stage)}, was not passed"
        return self._tabled(title, stage, stop.rows, f"%ddp_wrap {self.name}")

    def _show(self, stage: WrapStage, texts: Mapping[int, str]) -> StepTable:
        """Tabulate where the ranks are, with each one's result of `stage`."""
        title = f"{self.name}: before {construction.place(stage)}"
        if self.done:
            title = f"{self.target} is a DistributedDataParallel on {name_ranks(self.ranks)}"
        elif self.stage is not stage:
            title = f"{self.name}: passed {construction.place(stage)}"
        begun = self.stage is not WrapStage.PARAMETERS_VERIFIED
        passed = construction.before(self.stage) if begun else ""
        state = "done" if self.done else "paused"
        rows = construction.rows(
            {rank: (passed, state, texts.get(rank, "")) for rank in self.ranks}
        )
        return self._tabled(title, stage, rows, "" if self.done else "%ddp_step")

    def _tabled(
        self, title: str, stage: WrapStage, rows: tuple[StepRow, ...], then: str
    ) -> StepTable:
        details = tuple(self._details)
        self.table = StepTable(title, rows, stage.about, stage.link, then, details)
        return self.table

    # -- the stages --------------------------------------------------------------------

    def _pass(self, stage: WrapStage) -> dict[int, str]:
        """Have the ranks do what DDP's constructor does in `stage`; return each one's result.

        Raises _Stopped.
        """
        match stage:
            case WrapStage.PARAMETERS_VERIFIED:
                self._ask(calls.VERIFY, self._request, stage)
                count = construction.size(self._model)
                self._details.append(f"{count}, alike on {name_ranks(self.ranks)}")
                return dict.fromkeys(self.ranks, count)
            case WrapStage.BROADCAST:
                synced = self._ask(calls.BROADCAST, self._request, stage)
                texts = construction.what_changed(synced, self._model)
                first = synced[self.ranks[0]]
                self._details.append(
                    f"{counted(len(first.after), 'tensor')}, {format_bytes(first.size_bytes)}, "
                    f"from rank 0: {construction.size(self._model)}"
                )
                self._details += [f"{name_ranks(r)} {text}" for r, text in by_value(texts)]
                hashes = {rank: values.after for rank, values in synced.items()}
                diverged = construction.diverged(hashes, self.name)
                self._stop_if(diverged, stage, "values of rank 0")
                if len(self.ranks) > 1:
                    same = f"Now {name_ranks(self.ranks)} have the same values (hashed)."
                    self._details.append(same)
                return texts
            case WrapStage.BUCKETS:
                plans = self._ask(calls.PLAN_BUCKETS, self._ddp_options, stage)
                others = construction.other_buckets(plans, self.name)
                self._stop_if(others, stage, "as expected")
                plan = plans[self.ranks[0]]
                self._details += construction.plan_lines(plan)
                text = f"{counted(len(plan.first), 'bucket')} in the first step"
                text += f", {len(plan.later)} expected after it" if plan.later is not None else ""
                return dict.fromkeys(self.ranks, text)
            case WrapStage.REDUCER:
                try:
                    answers = self._ask(calls.CONSTRUCT, self._ddp_options, stage)
                except BaseException:
                    self._assign("")
                    raise
                # All ranks get their object, or none: a partial wrap would hang in the next
                # forward.
                self._assign(self.target)
                made = answers[self.ranks[0]]
                hooks = f"a hook on each of {made.hooks} parameters"
                sizes = ", ".join(map(format_bytes, made.sizes))
                self._details += [
                    f"The reducer has {hooks}; its buckets in the first step: {sizes}",
                    f"After a step, the buckets that come of it: %ddp_wrap {self.target} --buckets",
                ]
                done = f"{self.target} is a DistributedDataParallel, {hooks}"
                return dict.fromkeys(self.ranks, done)

    def _check_alike(self, stage: WrapStage) -> None:
        """Compare the models' fingerprints: ranks that differ must not begin a collective."""
        hashed = stage is WrapStage.REDUCER  # this stage does not send values itself
        request = calls.ModelToCompare(self.name, hashed)
        answers = self._ask(calls.COMPARE, request, stage)
        models = {rank: comparison.contents for rank, comparison in answers.items()}
        hashes = {rank: comparison.hashes for rank, comparison in answers.items()}
        findings = construction.compare(models, self.name) or construction.diverged(
            hashes, self.name
        )
        self._stop_if(findings, stage, "no collective was issued")
        self._model = models[self.ranks[0]]

    def _stop_if(self, findings: tuple[Finding, ...], stage: WrapStage, others: str) -> None:
        """Raise _Stopped if there are `findings`; `others` is the text of the ranks without one."""
        if findings:
            rows = construction.blamed_rows(findings, stage, self.ranks, others)
            raise _Stopped(findings, rows)

    def _assign(self, target: str) -> None:
        """Assign the DDP object to `target`; if empty, the ranks drop it when they can."""
        states = self._record.snapshot.ranks
        able = tuple(r for r in self.ranks if states[r].status is not Status.DEAD)
        request = calls.Assignment(self.name, target)
        with noted():
            sent = self._cluster.call(able, calls.ASSIGN, lambda _: request)
            for answer in sent.values() if target else ():
                self._cluster.value_of(answer, 10.0)

    # -- asking the ranks --------------------------------------------------------------

    def _ask(
        self,
        call: Call[Request, Answer | RankFailure],
        request: Request,
        stage: WrapStage | None = None,
    ) -> dict[int, Answer]:
        """Each rank's answer. Raises _Stopped in a stage, else UsageMistake, if one is missing.

        Raises CellInterrupted and SessionLost in any case.
        """
        answers = ask(self._cluster, self._record, self.ranks, call, request)
        if answers.complete:
            return answers.values
        if answers.interrupted:
            text = f"%ddp_wrap {self.name} was interrupted{f' in stage {stage}' if stage else ''}"
            if pending := answers.pending:
                text += f"; {name_ranks(pending)} still in it, get {them(pending)} back with "
                text += f"%ddp_restart --ranks {format_ranks(pending)}"
            again = f"Begin again: %ddp_wrap {self.name}"
            raise CellInterrupted(f"{text}. {self.target} is as it was. {again}", pending)
        if stage is None:
            text = next(
                (failure.text for failure in answers.failed.values()), "a rank does not answer"
            )
            raise UsageMistake(f"{self.name} cannot be looked at: {text}")
        findings = construction.failures(
            stage, answers.failed, answers.dead, answers.pending, self.name
        )
        rows = construction.stopped_rows(
            stage, self.ranks, answers.failed, tuple(answers.dead), answers.pending
        )
        raise _Stopped(findings, rows)
