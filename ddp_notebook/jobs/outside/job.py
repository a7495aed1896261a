"""A job that was not prepared, observed twice from outside: what its stacks prove, and no more.

Nothing is sent to it. A finding holds in both observations, and nothing moved between them: no
line, no variable, no CPU time, and no byte in a connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ddp_notebook.diagnosis import diagnose_setup
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.parallel.groups import other_groups
from ddp_notebook.diagnosis.progress import doing, in_setup, where_busy, works
from ddp_notebook.evidence.flight_recorder import Dump
from ddp_notebook.evidence.frames import Sources
from ddp_notebook.jobs.outside import pyspy, recorder, reports, system
from ddp_notebook.jobs.outside.pyspy import Stacks, Thread
from ddp_notebook.jobs.outside.system import Used
from ddp_notebook.jobs.unprepared import Seen
from ddp_notebook.jobs.verdict import AT_REST, Verdict, for_others
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Collectives,
    Diagnosis,
    Finding,
    Local,
    Probe,
    RankReport,
    Ranks,
    agree,
    name_ranks,
    them,
    verb,
)

BETWEEN_S = 1.5
"""Between the two observations."""
_IDLE_SHARE = 0.02
"""A process that uses a smaller share of a core than this only polls its clock."""
_MOST_RANKS = 4096
_CLOCK_S = 1.0
"""The system tells to the second when it was booted, and processes began in relation to that."""
_WATCHES = "_invoke_run"
_ENDS_RANKS = frozenset({"_stop_workers", "_restart_workers", "close", "_close", "_exit_barrier"})
"""Functions of torchrun's agent: while it is in the first and in none of these, no rank failed."""


@dataclass(frozen=True)
class Look:
    """An observation of a job at about one moment, by rank; `launcher`: its stacks."""

    threads: Mapping[int, tuple[Thread, ...]]
    used: Mapping[int, Used | None]
    launcher: tuple[Thread, ...] = ()
    why_not: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> Ranks:
        """The ranks that use CUDA."""
        return tuple(rank for rank, used in self.used.items() if used is not None and used.cuda)


@dataclass(frozen=True)
class Outside:
    """A job in two observations. `still` are the ranks that did not move between them."""

    case: Case
    still: Ranks
    threads: Mapping[int, tuple[Thread, ...]]
    why_not: tuple[str, ...] = ()
    recorded: Mapping[int, Dump] = field(default_factory=dict)
    """What torch's flight recorder says of ranks that give it away."""
    on_gpu: Ranks = ()
    """Ranks that use CUDA: a GPU may work while their threads wait for it."""

    def verdict(self) -> Verdict:
        """What is wrong with it, as far as stacks prove it.

        Flight recorders are shown beside it: they tell what was called, and not why.
        """
        diagnosis, known = self._diagnosis(), recorder.facts(self.recorded)
        if not diagnosis.wrong:
            return for_others(diagnosis, self._basis(), (*self.why_not, *known))
        findings = tuple(replace(f, evidence=(*f.evidence, *known)) for f in diagnosis.findings)
        return for_others(replace(diagnosis, findings=findings), self._basis(), self.why_not)

    def variables(self, rank: int) -> Mapping[int, tuple[Local, ...]]:
        """Those of the user's frames of a rank, by the frame's place in its path."""
        main = _main(self.threads.get(rank, ()))
        if main is None:
            return {}
        pairs = zip(main.frames, main.variables, strict=True)
        users = [own for frame, own in pairs if frame.users][::-1]
        return {
            number: tuple(Local(*pair) for pair in own.items()) for number, own in enumerate(users)
        }

    def _diagnosis(self) -> Diagnosis:
        diagnosis = _standing(self.case)
        waiting = self.case.waiting
        unknown = self.case.where(Activity.SILENT)
        if not self.threads:
            return replace(diagnosis, findings=(), unsure=_NO_STACKS)
        moves = tuple(rank for rank in waiting if rank not in self.still)
        if moves:
            why = f"No problem found so far: {verb(moves, 'goes', 'go')} on."
        elif unknown:
            does = agree(unknown, "it does", "they do")
            why = f"Undecided: of {name_ranks(unknown)} it is not known what {does}."
        elif waiting:
            why = (
                f"Undecided: {verb(waiting, 'waits', 'wait')}, and did not move for "
                f"{BETWEEN_S} s; the stacks do not prove why. {_MORE}"
            )
        else:
            why = (
                f"No problem found so far: {verb(self.case.where(Activity.BUSY), 'goes', 'go')} on."
            )
        if moves or unknown:
            return replace(diagnosis, findings=(), unsure=why)
        return self._unproven(diagnosis, why)

    def _unproven(self, diagnosis: Diagnosis, why: str) -> Diagnosis:
        """With `why` no proof is there that all is well, where nothing is wrong."""
        if not all(finding.passing for finding in diagnosis.findings):
            return diagnosis
        findings = tuple(self._with_rest(finding) for finding in diagnosis.findings)
        return replace(diagnosis, findings=findings, unsure=why)

    def _with_rest(self, finding: Finding) -> Finding:
        """A finding on ranks that are late, with which of them do nothing at all meanwhile."""
        still = tuple(rank for rank in finding.ranks if rank in self.still)
        if not still:
            return finding
        fact = f"{name_ranks(still)} used no CPU time and stayed at one line for {BETWEEN_S} s"
        lines = [self.case.ranks[rank].path[-1] for rank in still if self.case.ranks[rank].path]
        sleeps = any("sleep(" in place.text for place in lines)
        if sleeps or still != finding.ranks or self._may_work(finding):
            return replace(finding, evidence=(*finding.evidence, f"{fact}: {AT_REST}"))
        at = " and ".join(f"{place}: {place.text}" for place in dict.fromkeys(lines))
        return Finding(
            Category.UNDECIDED,
            (),
            f"{verb(finding.waiting, 'waits', 'wait')} for {name_ranks(still)}, which "
            f"{agree(still, 'does', 'do')} nothing ({at}): asleep, or waiting for a lock, a file "
            "or a process",
            "Look at that line, and ask again: a rank that sleeps will be elsewhere.",
            finding.waiting,
            (*finding.evidence, fact),
        )

    def _may_work(self, finding: Finding) -> bool:
        """Whether ranks that others wait for may do something all the same: in set-up, on a GPU."""
        begins = any(in_setup(self.case.ranks[rank]) for rank in finding.waiting)
        return begins or not set(self.on_gpu).isdisjoint(finding.ranks)

    def _basis(self) -> str:
        if not self.threads:
            return "the processes alone, without stacks"
        before = "which collectives ranks called before is not known"
        if self.recorded:
            before = f"torch's flight recorders of {name_ranks(self.recorded)}"
        return (
            f"Python stacks of {name_ranks(self.threads)} by py-spy, read twice within "
            f"{BETWEEN_S} s; {before}"
        )


_NO_STACKS = (
    "Undecided: the job was started without DDP_NOTEBOOK=1, and its Python stacks cannot be read."
)
_MORE = "More is known of a job that was started with DDP_NOTEBOOK=1 in its environment."


def look(ranks: Mapping[int, Seen], twice: bool = True) -> Outside:
    """Observe a job's ranks twice; or once, which shows where they are but proves nothing."""
    began_s = time.monotonic()
    first = _look(ranks)
    if not (first.threads and twice):
        return seen(ranks, first, first)
    time.sleep(max(0.0, began_s + BETWEEN_S - time.monotonic()))
    found = seen(ranks, first, _look(ranks))
    sources = Sources(min(process.began_s for process in ranks.values()) + _CLOCK_S)
    return replace(found, recorded=recorder.read(ranks, sources))


def _look(ranks: Mapping[int, Seen]) -> Look:
    parents = {process.parent for process in ranks.values()}
    pids = {rank: process.pid for rank, process in ranks.items() if process.torch}
    watched = [pid for pid in parents if system.is_torchrun(pid)]
    stacks: Stacks = pyspy.read((*pids.values(), *watched))
    return Look(
        {rank: stacks.of[pid] for rank, pid in pids.items() if pid in stacks.of},
        {rank: system.used(process.pid) for rank, process in ranks.items()},
        stacks.of.get(watched[0], ()) if len(parents) == len(watched) == 1 else (),
        stacks.why_not,
    )


def seen(ranks: Mapping[int, Seen], first: Look, second: Look) -> Outside:
    """The result of two observations of the same ranks."""
    told = next(iter(ranks.values())).told
    sources = Sources(min(process.began_s for process in ranks.values()) + _CLOCK_S)
    still = tuple(rank for rank in ranks if _is_still(rank, first, second))
    size = max(*ranks, *(process.world_size - 1 for process in ranks.values())) + 1
    ended_well = _watches(first, second) and told.get("GROUP_WORLD_SIZE") == "1"
    found = [
        _seen(rank, ranks[rank], second, sources, rank in still)
        if rank in ranks
        else reports.Seen(_absent(rank, ended_well))
        for rank in range(min(size, _MOST_RANKS))
    ]
    records = {
        thread.record.rank: (thread.record,) for thread in found if thread.record is not None
    }
    case = Case(
        _without_ports(thread.report for thread in found),
        told,
        None if told.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
        collectives=Collectives(records),
        sources=sources.texts,
    )
    why_not = tuple(dict.fromkeys((*first.why_not, *second.why_not)))
    return Outside(case, still, second.threads, why_not, on_gpu=second.on_gpu)


def _seen(rank: int, process: Seen, now: Look, sources: Sources, still: bool) -> reports.Seen:
    """A rank that has a process."""
    if not process.torch:
        return reports.Seen(RankReport(rank, Activity.BUSY, doing="it has not loaded torch yet"))
    used, threads = now.used.get(rank), now.threads.get(rank)
    if threads is None or used is None:
        return reports.Seen(RankReport(rank, doing="its Python stack could not be read"))
    found = reports.report_of(rank, threads, sources, still and not used.cuda)
    return replace(found, report=_with_port(_with_probe(found.report, process.pid), process))


def _is_still(rank: int, first: Look, second: Look) -> bool:
    """True where the main thread, and all else of the process, was the same in both looks."""
    before, after = first.used.get(rank), second.used.get(rank)
    if before is None or after is None or {before.state, after.state} != {"S"}:
        return False
    if after.ticks - before.ticks > max(1.0, system.ticks_in(BETWEEN_S * _IDLE_SHARE)):
        return False
    mains = [_main(each.threads.get(rank, ())) for each in (first, second)]
    return before.queues == after.queues and mains[0] is not None and mains[0] == mains[1]


def _standing(case: Case) -> Diagnosis:
    """Return what stacks alone show: mistakes of set-up, other groups, and ranks that are late.

    A stack has the one collective in which a rank waits, not those before. So which of ranks at
    different lines is wrong is not said: ranks at one line may be in other turns of a loop.
    """
    late = tuple(report for report in case.ranks if works(report))
    diagnosis = Diagnosis((), None, case.world_size)
    if any(in_setup(report) and not report.initialized for report in case.ranks):
        done = (replace(e, activity=Activity.IDLE) if e.exit_code == 0 else e for e in case.ranks)
        diagnosis = diagnose_setup(replace(case, ranks=tuple(done)))
    elif late and case.waiting:
        ranks = tuple(report.rank for report in late)
        busy = "; ".join(f"rank {report.rank} is busy{where_busy(report)}" for report in late)
        finding = Finding(
            Category.STRAGGLER,
            ranks,
            f"{verb(case.waiting, 'waits', 'wait')} in a collective; {busy}",
            f"Wait for {them(ranks)}.",
            case.waiting,
            passing=True,
        )
        diagnosis = replace(diagnosis, findings=(finding,))
    elif not late:
        diagnosis = replace(diagnosis, findings=tuple(other_groups(Context(case))))
    return replace(
        diagnosis, doing={report.rank: doing(report) for report in case.ranks}, unsure=""
    )


def _main(threads: Iterable[Thread]) -> Thread | None:
    return next((thread for thread in threads if thread.main), None)


def _watches(first: Look, second: Look) -> bool:
    """True while torchrun's agent only watches its ranks: none has failed, none is being ended."""
    for each in (first, second):
        names = {frame.function for thread in each.launcher for frame in thread.frames}
        if _WATCHES not in names or names & _ENDS_RANKS:
            return False
    return True


def _absent(rank: int, ended_well: bool) -> RankReport:
    if ended_well:  # torchrun would have ended the others, if it had failed
        return RankReport(
            rank, Activity.IDLE, exit_code=0, doing="its process ended without an error"
        )
    return RankReport(rank, doing="no process of it is on this host")


def _with_port(report: RankReport, process: Seen) -> RankReport:
    """With the port of the store that a rank has reached: what it was told, if it is connected."""
    told = process.told.get("MASTER_PORT", "")
    if report.inside != "process-group" or report.initialized or not told.isdigit():
        return report
    if int(told) not in system.connected(process.pid):
        return report
    return replace(report, arguments=replace(report.arguments, master_port=int(told)))


def _without_ports(found: Iterable[RankReport]) -> tuple[RankReport, ...]:
    """Without the store's ports where those of some ranks are unknown: which one is right then?"""
    found = tuple(found)
    unknown = (e.inside == "process-group" and e.arguments.master_port is None for e in found)
    if not any(unknown):
        return found
    return tuple(replace(e, arguments=replace(e.arguments, master_port=None)) for e in found)


def _with_probe(report: RankReport, pid: int) -> RankReport:
    """Adds whether a process listens at the store, if it is on this host."""
    given = report.arguments
    if report.inside != "store" or given.master_port is None:
        return report
    if not (given.master_addr == "localhost" or given.master_addr.startswith("127.")):
        return report
    listens = system.listens(pid, given.master_port)
    state = {True: "open", False: "refused", None: ""}[listens]
    detail = "" if listens else "no process listens there"
    return replace(report, probe=Probe(f"{given.master_addr}:{given.master_port}", state, detail))
