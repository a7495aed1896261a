"""Diagnoses the ranks' current state, or their last run."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddp_notebook.diagnosis import catalogue, diagnose_run, failures
from ddp_notebook.diagnosis.collectives.meshes import Mesh, mesh_of
from ddp_notebook.model import (
    Activity,
    Case,
    Collectives,
    Diagnosis,
    JudgedRun,
    Status,
    name_ranks,
)
from ddp_notebook.session.findings import SET_UP
from ddp_notebook.session.runs.gather import remarks_on
from ddp_notebook.views.board_rows import no_group

if TYPE_CHECKING:
    from ddp_notebook.session.findings import LastFindings
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.runs.run import CellRun
    from ddp_notebook.session.set_up import SetUp


@dataclass(eq=False)
class Why:
    """Diagnoses the ranks of a session; from any thread, any time."""

    _runs: RunRegistry
    _set_up: SetUp
    _findings: LastFindings
    _record: Record

    def diagnose(self) -> Diagnosis:
        """The current diagnosis of the ranks. From any thread, any time.

        Once a run or a setup is over, it is the diagnosis of that one until the next begins: its
        `run` says which one, and how long ago.
        """
        case, current = self.case("%ddp_why"), self._runs.current
        now = diagnose_run(case)
        # Which question is meant depends on what there is: ranks in setup, ranks in a run, or
        # neither. A script has a setup of its own, so it counts as a run from its beginning.
        if self._set_up.half_way and self._runs.script is None:
            diagnosis = self._of_set_up(case, now)
        elif current is not None and not current.done:
            diagnosis = self._of_run(current, case, now)
        else:
            diagnosis = self._of_the_past(case, now)
        processes = self._set_up.need("%ddp_why").processes
        if diagnosis.proven and (lacking := self._record.snapshot.groupless):
            diagnosis = replace(diagnosis, unsure=f"No problem found. {no_group(lacking)}.")
        note = processes.unasked
        if gone := processes.folder_gone:
            note = f"{gone} Start again: %ddp_init --replace"
        return replace(diagnosis, notes=(note, *diagnosis.notes)) if note else diagnosis

    def diagnose_now(self) -> Diagnosis:
        """The diagnosis of the ranks' current state alone, without earlier findings."""
        return self._with_wrong_results(diagnose_run(self.case("%ddp_why")))

    def mesh(self) -> Mesh | None:
        """The mesh that the ranks have made; None for none. Raises NoSession, SessionLost."""
        return mesh_of(self.case("--ranks"))

    def case(self, verb: str) -> Case:
        """The current case: the ranks, and what they run or ran last.

        Raises NoSession, SessionLost.
        """
        bring_up = self._set_up.need(verb)
        script, current = self._runs.script, self._runs.current
        if script is not None:
            return script.look()
        if current is not None and not self._set_up.half_way:
            case, snapshot = current.look(as_script=False), self._record.snapshot
            died = set(snapshot.with_status(Status.DEAD)) - current.events.died.keys()
            # What ranks issued in a run that is over says nothing of them once they were freed, or
            # one of them has died.
            if current.done and (died or current.generation != snapshot.generation):
                case = replace(case, collectives=Collectives())
            return case
        return bring_up.look()

    # -- while something goes on -----------------------------------------------------------

    def _of_set_up(self, case: Case, now: Diagnosis) -> Diagnosis:
        """The diagnosis of ranks that are in setup, or whose setup failed."""
        going_on = replace(now, run=JudgedRun(SET_UP))
        if not now.wrong:
            own = failures.failed_in_set_up(self._record.snapshot.ranks, case)
            going_on = replace(going_on, findings=(*own, *now.findings))
        last = self._findings.last
        diagnosis = last.diagnosis if last is not None else None
        if diagnosis is None or last is None:
            return self._unexplained(case, going_on, SET_UP)
        if last.title == SET_UP:
            return going_on if going_on.findings else diagnosis
        # A cell can run on ranks that are not set up; why they are not is reported below.
        new = tuple(f for f in going_on.findings if f not in diagnosis.findings)
        return replace(diagnosis, findings=(*diagnosis.findings, *new))

    def _of_run(self, run: CellRun, case: Case, now: Diagnosis) -> Diagnosis:
        """The diagnosis of a run that ranks are in."""
        found = run.found
        findings = tuple(
            replace(
                finding,
                cause=catalogue.words("rank-died.ended.restarted", ranks=finding.ranks),
                evidence=(),
            )
            if finding.died_of(run.events.restarted)
            else finding
            for finding in now.findings
        )
        going_on = run.events.with_tracebacks(replace(now, run=found.run, findings=findings))
        if now.wrong:
            return going_on
        if own := failures.raised(run.events.finished.values(), run.ranks, case.sources):
            return replace(going_on, findings=(*own, *now.findings))
        # No rule finds that nothing has moved for long; it was found while it was so.
        before = found.diagnosis
        if before is not None and before.wrong and case.waiting and not case.where(Activity.BUSY):
            return before
        if left := failures.left_by_interrupted(run.events.finished.values(), case):
            return replace(going_on, findings=(left,))
        return self._with_remarks(self._unexplained(case, going_on, run.title), run)

    def _unexplained(self, case: Case, diagnosis: Diagnosis, title: str) -> Diagnosis:
        """`diagnosis`; without findings, also which ranks wait, and for how long."""
        if diagnosis.findings:
            return diagnosis
        now_ns = time.monotonic_ns()
        states = self._record.snapshot.ranks
        # Since when each rank has been in its collective, or at the line where it is.
        since_ns = {state.rank: state.since_ns for state in states if state.status in _AT_WORK}
        for report in case.ranks:
            issued = case.collectives.of.get(report.rank)
            if issued and report.waits_for == issued[-1].number:
                since_ns[report.rank] = issued[-1].issued_ns
        waited_s = {rank: (now_ns - since) / 1e9 for rank, since in since_ns.items() if since}
        if finding := failures.unexplained(case, waited_s):
            return replace(diagnosis, findings=(finding,))
        current = self._runs.current
        pending = current.pending if current is not None else ()
        return replace(diagnosis, unsure=failures.unsure(case, waited_s, title, pending))

    # -- once it is over -------------------------------------------------------------------

    def _of_the_past(self, case: Case, now: Diagnosis) -> Diagnosis:
        """The diagnosis of the last, finished run, and what has happened to its ranks since."""
        last = self._findings.last
        if last is None:
            return self._with_wrong_results(now)
        diagnosis, away = last.diagnosis, {*case.where(Activity.DEAD, Activity.SILENT)}
        if diagnosis is None:
            if any(away.intersection(finding.ranks) for finding in now.findings):
                return now  # they ended after the run
            now = replace(self._with_wrong_results(now), run=last.run)
            current = self._runs.current
            ends = current.events.finished.values() if current is not None else ()
            if not now.findings and (stopped := failures.interrupted(ends)):
                return replace(now, unsure=stopped)
            return self._unexplained(case, now, last.run.title)
        known = [set(before.ranks) for before in diagnosis.findings]
        # Of ranks that have died or become unresponsive since it was found.
        gone = tuple(
            finding
            for finding in now.findings
            if (lost := away.intersection(finding.ranks))
            if not finding.passing and not any(map(lost.issubset, known))
        )
        if not gone:
            return diagnosis
        who = name_ranks(sorted({rank for finding in gone for rank in finding.ranks}))
        note = f"{who.capitalize()} ended after {last.title} was over."
        return replace(
            diagnosis, findings=(*gone, *diagnosis.findings), notes=(note, *diagnosis.notes)
        )

    def _with_wrong_results(self, diagnosis: Diagnosis) -> Diagnosis:
        current = self._runs.current
        if diagnosis.findings or current is None or self._set_up.half_way:
            return diagnosis
        wrong_result = current.examine()
        if wrong_result is None:
            return self._with_remarks(diagnosis, current)
        notes = tuple(dict.fromkeys((*diagnosis.notes, *wrong_result.notes)))
        return replace(diagnosis, findings=wrong_result.findings, notes=notes)

    def _with_remarks(self, diagnosis: Diagnosis, run: CellRun) -> Diagnosis:
        """For a run without a problem: whether a rank is slow, or ranks have started ranks."""
        if diagnosis.findings or len(run.ranks) < 2:
            return diagnosis
        started = run.started_ranks.remarks() if run.started_ranks is not None else ()
        remarks = remarks_on(run.events, run.cluster)
        return replace(diagnosis, remarks=(*started, *remarks))


_AT_WORK = (Status.RUNNING, Status.SETTING_UP)
