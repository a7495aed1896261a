"""Jobs that were not prepared, seen from outside: who their ranks are, and what two looks prove.

Ranks are known by the environment with which they were started. Nothing is sent to them: their
Python stacks are read by py-spy, and their state, CPU time and connections from /proc. A finding
holds in both of two looks, and nothing moved between them: no line, no variable, no CPU time, and
no byte in a connection.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.progress import in_setup
from ddp_notebook.diagnosis.standing_still import diagnose_standing
from ddp_notebook.jobs import pyspy
from ddp_notebook.jobs.frames import Sources
from ddp_notebook.jobs.pyspy import Thread
from ddp_notebook.jobs.verdict import AT_REST, Verdict, for_others
from ddp_notebook.launch.process_groups import stat_fields
from ddp_notebook.model import (
    Activity,
    Case,
    Collective,
    Collectives,
    Finding,
    Local,
    Probe,
    ProcessEnd,
    RankReport,
    Ranks,
    agree,
    name_ranks,
    verb,
)
from ddp_notebook.rank.prepared import job_folder, processes
from ddp_notebook.rank.prepared.processes import has_torch
from ddp_notebook.views.ansi import plain

# -- who they are ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """A process of this user's that a launcher told its rank.

    `told` is what it was told with it, by the names of environment variables. `torch` is true
    once it has loaded torch.
    """

    pid: int
    parent: int
    rank: int
    world_size: int
    script: str
    began_s: float
    """Since 1970."""
    told: Mapping[str, str] = field(default_factory=dict)
    torch: bool = True
    scheduled: bool = False
    """Its rank is what a scheduler told it: srun or mpirun."""

    @property
    def launched(self) -> tuple[object, ...]:
        """A key that all ranks of a job share, and all that one shell has started."""
        return self.parent, self.script

    @property
    def launches(self) -> tuple[object, ...]:
        """The key `launched` of the ranks that it starts itself."""
        return self.pid, self.script

    @property
    def meets(self) -> str:
        """Where it was told to meet the other ranks."""
        return job_folder.meeting_point(self.told)


def job_of(pid: int, prepared: frozenset[int]) -> dict[int, Seen] | None:
    """Return the ranks of the job of a process, a rank or the launcher; None if it is neither."""
    for ranks in jobs(prepared):
        if any(pid in (process.pid, process.parent) for process in ranks.values()):
            return ranks
    return None


def jobs(prepared: frozenset[int]) -> list[dict[int, Seen]]:
    """Return the ranks by job, the newest first; without those of the pids in `prepared`.

    Ranks that have not loaded torch yet are no job.
    """
    told = {process.pid: process for process in _told()}
    # What a rank starts, as the workers of a loader, inherits what it was told. A shell around a
    # rank was told the same, and torchrun that a scheduler has started is no rank either.
    around = {
        pid for process in told.values() if process.torch for pid in processes.around(process.pid)
    }
    above_ranks = (told.get(process.parent) for process in told.values() if not process.scheduled)
    around |= {above.pid for above in above_ranks if above and above.scheduled}
    told_ranks = []
    for process in sorted(told.values(), key=lambda process: process.began_s):
        above = None if process.parent in around else told.get(process.parent)
        inherits = above is not None and above.rank == process.rank
        if not (inherits or {process.pid, process.parent} & prepared or process.pid in around):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                told_ranks.append(replace(process, parent=processes.launcher(process.pid)))
    found = job_folder.by_job(told_ranks)
    with_torch = (of for of in found if any(process.torch for process in of.values()))
    ranks = [dict(sorted(of.items())) for of in with_torch]
    return sorted(ranks, key=lambda of: -min(process.began_s for process in of.values()))


def how_to_see(pid: int) -> str:
    """Return the command that shows the stacks of a process without pausing it."""
    return f"py-spy dump --nonblocking --pid {pid}"


def was_set(pid: int) -> bool:
    """True of a process of this user's that began with DDP_NOTEBOOK=1."""
    try:
        return processes.environment(pid).get("DDP_NOTEBOOK") == "1"
    except OSError:
        return False


def why_not_prepared(pid: int) -> str:
    """Say why a process cannot be asked that began with DDP_NOTEBOOK=1; empty of any other."""
    return (elsewhere(pid) or _NOT_YET) if was_set(pid) else ""


_NOT_YET = (
    "It has DDP_NOTEBOOK=1 in its environment: perhaps it has not yet imported torch; then ask "
    "again. Or torch did not call this package: it is older than 2.5, "
    "TORCH_DEVICE_BACKEND_AUTOLOAD is 0, or its Python has no ddp_notebook installed. Then start "
    "it so: torchrun … -m ddp_notebook.run train.py"
)


def elsewhere(pid: int) -> str:
    """Say that a process has its record for another user or in another folder; empty if not so."""
    if (user := processes.other_user(pid)) is not None:
        return f"It is a process of user {user}, whom alone it answers."
    try:
        theirs = processes.environment(pid)
    except OSError:
        return ""
    folder = job_folder.FOLDER_VARIABLE
    name = folder if folder in theirs or folder in os.environ else "TMPDIR"
    if theirs.get(name, "") == os.environ.get(name, ""):
        return ""
    how = f"with {name}={shlex.quote(plain(theirs[name]))}" if name in theirs else f"without {name}"
    read = plain(str(job_folder.root()))
    return f"It was started {how}, and its record is not in {read}: ask with the same {name}."


def untold(pid: int) -> tuple[int, ...]:
    """Return the processes with torch that a process started, and that it told no rank.

    So are those of ``mp.spawn``: they set their own environment, which cannot be seen.
    """
    try:
        return tuple(
            child
            for child in processes.children(pid) or ()
            if has_torch(child) and not processes.launch_parameters(processes.environment(child))
        )
    except OSError:
        return ()


def _told() -> Iterator[Seen]:
    try:
        pids = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()}
    except OSError:
        return  # not Linux
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    # What a process is told when it starts stays in /proc, whatever it sets later: so RANK there is
    # what a launcher said. Of mp.spawn it says nothing, for that is told by arguments (`untold`).
    for pid in sorted(pids - {os.getpid()})[:10_000]:
        try:
            values = processes.environment(pid)
            rank = processes.launch_parameters(values)
            state, parent = stat_fields(Path(f"/proc/{pid}/stat"))[:2]
            if rank is None or state == "Z":
                continue
            words = processes.read(pid, "cmdline").split("\0")[1:]
            module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
            yield Seen(
                pid,
                int(parent),
                rank.rank,
                rank.world_size,
                [*(word for word in words if word.endswith(".py")), *module, ""][0],
                booted_s + job_folder.began(pid) / os.sysconf("SC_CLK_TCK"),
                {name: values[name] for name in _TOLD if name in values},
                has_torch(pid),
                rank.by_scheduler,
            )
        except (OSError, ValueError, IndexError):  # another user's, or it ended meanwhile
            continue


_TOLD = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", job_folder.SLURM_JOB),
)


# -- what the system knows of a process ------------------------------------------------------

_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""


@dataclass(frozen=True, slots=True)
class Used:
    """A process at one moment. What differs between two of them shows that it moved.

    `ticks` is the CPU time of all its threads, in the system's ticks; `queues` has what waits in
    each of its TCP connections, to be sent and to be read, in bytes.
    """

    state: str
    """The system's letter: R runs, S sleeps, T is stopped, Z has ended."""
    ticks: int
    queues: Mapping[str, tuple[int, int]]
    cuda: bool = False
    """It has the driver of a GPU loaded: then it may wait for the GPU."""
    reached: frozenset[int] = frozenset()
    """The ports to which it has TCP connections."""


def used(pid: int) -> Used | None:
    """Return what the system knows of a process; None if it is gone, or another user's."""
    try:
        words = stat_fields(Path(f"/proc/{pid}/stat"))
        own = set()
        for path in list(Path(f"/proc/{pid}/fd").iterdir())[:65_536]:
            with contextlib.suppress(OSError):  # closed meanwhile
                own.add(str(path.readlink()))
        connections = (row for row in _tcp(pid) if row.state != _LISTEN)
        rows = [row for row in connections if f"socket:[{row.inode}]" in own]
        cuda = "libcuda.so" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except (OSError, IndexError):
        return None
    # CPU time comes in ticks, and a rank that gets its data slowly uses less than one between two
    # looks. What waits in its connections changes all the same.
    queues = {row.inode: row.queued for row in rows}
    reached = frozenset(_port(row.other) for row in rows) - {0}
    return Used(words[0], int(words[11]) + int(words[12]), queues, cuda, reached)


def is_torchrun(pid: int) -> bool:
    """True of torchrun's agent, by its command line."""
    try:
        words = processes.read(pid, "cmdline")
    except OSError:
        return False
    names = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
    return any(name in words for name in names)


def listens(pid: int, port: int) -> bool | None:
    """True if a process listens on a TCP port in the network of `pid`; None if unknown."""
    try:
        rows = list(_tcp(pid))
    except OSError:
        return None
    return any(row.state == _LISTEN and _port(row.at) == port for row in rows)


class _Socket(NamedTuple):
    """A TCP socket. `at` and `other` are its own end and its peer's, as the system writes them."""

    inode: str
    state: str
    queued: tuple[int, int]
    """Bytes to be sent, and to be read."""
    at: str
    other: str


def _tcp(pid: int) -> Iterable[_Socket]:
    """Each TCP socket of its network."""
    for name in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{name}")
        if name == "tcp6" and not path.exists():
            return  # a kernel without IPv6
        for line in path.read_text().splitlines()[1:]:
            words = line.split()
            to_send, _, to_read = words[4].partition(":")
            queued = int(to_send, 16), int(to_read, 16)
            yield _Socket(words[9], words[3], queued, words[1], words[2])


def _port(end: str) -> int:
    return int(end.rpartition(":")[2], 16)


# -- two looks -------------------------------------------------------------------------------

BETWEEN_S = 1.5
"""Between the two observations."""
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


@dataclass(frozen=True)
class Outside:
    """A job in two observations. `still` are the ranks that did not move between them."""

    case: Case
    still: Ranks
    threads: Mapping[int, tuple[Thread, ...]]
    why_not: tuple[str, ...] = ()
    on_gpu: Ranks = ()
    """Ranks that use CUDA: a GPU may work while their threads wait for it."""
    more: str = ""
    """How more can be known of it."""

    def verdict(self) -> Verdict:
        """Return what is wrong with it, as far as stacks prove it."""
        diagnosis = diagnose_standing(self.case)
        waiting, unknown = self.case.waiting, self.case.where(Activity.SILENT)
        moves = tuple(rank for rank in waiting if rank not in self.still)
        findings, unsure = diagnosis.findings, ""
        basis = (
            f"Python stacks of {name_ranks(self.threads)} by py-spy, read twice within "
            f"{BETWEEN_S} s; which collectives ranks called before is not known"
        )
        # Stacks prove a hang only if nobody can end it: one rank that moved, or of which nothing is
        # known, may be just the one that the others wait for.
        if not self.threads:
            basis = "the processes alone, without stacks"
            findings = ()
            unsure = f"Undecided: its Python stacks cannot be read. {self.more}"
        elif moves:
            findings, unsure = (), _goes_on(moves)
        elif unknown:
            does = agree(unknown, "it does", "they do")
            findings = ()
            unsure = f"Undecided: of {name_ranks(unknown)} it is not known what {does}."
        elif all(finding.passing for finding in findings):
            findings = tuple(self._with_rest(finding) for finding in findings)
            unsure = _goes_on(self.case.where(Activity.BUSY))
            if waiting:
                unsure = (
                    f"Undecided: {verb(waiting, 'waits', 'wait')}, and did not move for "
                    f"{BETWEEN_S} s; the stacks do not prove why. {self.more}"
                )
        diagnosis = replace(diagnosis, findings=findings, unsure=unsure)
        return for_others(diagnosis, basis, self.why_not)

    def variables(self, rank: int) -> tuple[tuple[Local, ...], ...]:
        """Return the variables in each of a rank's frames of the user's, the outermost first."""
        main = _main(self.threads.get(rank, ())) or Thread("", True)
        pairs = zip(main.frames, main.variables, strict=True)
        users = [own for frame, own in pairs if frame.users][::-1]
        return tuple(tuple(Local(*pair) for pair in own.items()) for own in users)

    def _with_rest(self, finding: Finding) -> Finding:
        """Add to a finding on late ranks which of them do nothing at all meanwhile."""
        still = tuple(rank for rank in finding.ranks if rank in self.still)
        if not still:
            return finding
        fact = f"{name_ranks(still)} used no CPU time and stayed at one line for {BETWEEN_S} s"
        lines = (place for rank in still for place in self.case.ranks[rank].path[-1:])
        at = " and ".join(dict.fromkeys(f"{place}: {place.text}" for place in lines))
        # A rank that uses no CPU may go on all the same: asleep, in setup, or on a GPU.
        in_set_up = any(in_setup(self.case.ranks[rank]) for rank in finding.waiting)
        may_go_on = "sleep(" in at or in_set_up or not set(self.on_gpu).isdisjoint(finding.ranks)
        if still != finding.ranks or may_go_on:
            return replace(finding, evidence=(*finding.evidence, f"{fact}: {AT_REST}"))
        return catalogue.finding(
            "undecided.at-rest",
            (),
            waiting=finding.waiting,
            evidence=(*finding.evidence, at, fact),
            still=still,
        )


def _goes_on(ranks: Ranks) -> str:
    return f"No problem found so far: {verb(ranks, 'goes', 'go')} on."


_MORE = "More is known of a job that was started with DDP_NOTEBOOK=1 in its environment."


def look(ranks: Mapping[int, Seen], twice: bool = True) -> Outside:
    """Observe a job's ranks twice; or once, which shows where they are but proves nothing."""
    began_s = time.monotonic()
    first = _look(ranks)
    if not (first.threads and twice):
        return seen(ranks, first, first)
    time.sleep(max(0.0, began_s + BETWEEN_S - time.monotonic()))
    return seen(ranks, first, _look(ranks))


def _look(ranks: Mapping[int, Seen]) -> Look:
    parents = {process.parent for process in ranks.values()}
    pids = {rank: process.pid for rank, process in ranks.items() if process.torch}
    watched = [pid for pid in parents if is_torchrun(pid)]
    stacks = pyspy.read((*pids.values(), *watched))
    return Look(
        {rank: stacks.of[pid] for rank, pid in pids.items() if pid in stacks.of},
        {rank: used(process.pid) for rank, process in ranks.items()},
        stacks.of.get(watched[0], ()) if len(parents) == len(watched) == 1 else (),
        stacks.why_not,
    )


def seen(ranks: Mapping[int, Seen], first: Look, second: Look) -> Outside:
    """Return the result of two observations of the same ranks."""
    told = next(iter(ranks.values())).told
    # When a process began is known in relation to when the system was booted, and the clock may
    # have been set a little since.
    sources = Sources(min(process.began_s for process in ranks.values()) + 1.0)
    still = tuple(rank for rank in ranks if _is_still(rank, first, second))
    size = max(*ranks, *(process.world_size - 1 for process in ranks.values())) + 1
    absent = RankReport(0, doing="no process of it is on this host")
    if _watches(first, second) and told.get("GROUP_WORLD_SIZE") == "1":
        # torchrun would have ended the others, if it had failed
        absent = RankReport(
            0, Activity.IDLE, end=ProcessEnd(code=0), doing="its process ended without an error"
        )
    reports: list[RankReport] = []
    records: dict[int, tuple[Collective, ...]] = {}
    for rank in range(min(size, 4096)):
        process, threads, used = ranks.get(rank), second.threads.get(rank), second.used.get(rank)
        if process is None:
            report = replace(absent, rank=rank)
        elif not process.torch:
            report = RankReport(rank, Activity.BUSY, doing="it has not loaded torch yet")
        elif threads is None or used is None:
            report = RankReport(rank, doing="its Python stack could not be read")
        else:
            rests = rank in still and not used.cuda
            report, record = pyspy.report_of(rank, threads, sources, rests)
            report = _with_store(report, process, used)
            if record is not None:
                records[rank] = (record,)
        reports.append(report)
    # Where the store's ports of some ranks are unknown, nothing says which of the others is right.
    if any(e.inside == "process-group" and e.arguments.master_port is None for e in reports):
        reports = [replace(e, arguments=replace(e.arguments, master_port=None)) for e in reports]
    case = Case(
        tuple(reports),
        told,
        None if told.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
        collectives=Collectives(records),
        sources=sources.texts,
    )
    why_not = tuple(dict.fromkeys((*first.why_not, *second.why_not)))
    on_gpu = tuple(rank for rank, used in second.used.items() if used is not None and used.cuda)
    more = why_not_prepared(next(iter(ranks.values())).pid) or _MORE
    return Outside(case, still, second.threads, why_not, on_gpu, more)


def _is_still(rank: int, first: Look, second: Look) -> bool:
    """True where the main thread, and all else of the process, was the same in both looks."""
    before, after = first.used.get(rank), second.used.get(rank)
    if before is None or after is None or {before.state, after.state} != {"S"}:
        return False
    # A rank that waits uses some CPU time all the same: gloo's threads and torch's watchdogs poll.
    # 2 % of a core is more than they use, and less than any loop of the user's. One tick (10 ms) is
    # always allowed, for CPU time is counted in ticks.
    if after.ticks - before.ticks > max(1.0, BETWEEN_S * 0.02 * os.sysconf("SC_CLK_TCK")):
        return False
    # The queues hold bytes that have arrived, or are to be sent. If they changed, data moves though
    # no line of Python does, as in a large all_reduce.
    mains = [_main(each.threads.get(rank, ())) for each in (first, second)]
    return before.queues == after.queues and mains[0] is not None and mains[0] == mains[1]


def _main(threads: Iterable[Thread]) -> Thread | None:
    return next((thread for thread in threads if thread.main), None)


def _watches(first: Look, second: Look) -> bool:
    """True while torchrun's agent only watches its ranks: none has failed, none is being ended."""
    for each in (first, second):
        names = {frame.function for thread in each.launcher for frame in thread.frames}
        if _WATCHES not in names or names & _ENDS_RANKS:
            return False
    return True


def _with_store(report: RankReport, process: Seen, used: Used) -> RankReport:
    """Add what is known of the store: at which port a rank has reached it, or else whether a
    process listens there, if it is on this host."""
    given = report.arguments
    is_here = given.master_addr == "localhost" or given.master_addr.startswith("127.")
    if report.inside == "store" and is_here and given.master_port is not None:
        is_open = listens(process.pid, given.master_port)
        state = {True: "open", False: "refused", None: ""}[is_open]
        detail = "" if is_open else "no process listens there"
        probe = Probe(f"{given.master_addr}:{given.master_port}", state, detail)
        return replace(report, network=replace(report.network, probe=probe))
    # It has reached the port that it was told, if it is connected to that.
    told = process.told.get("MASTER_PORT", "")
    in_group = report.inside == "process-group" and not report.initialized
    if in_group and told.isdigit() and int(told) in used.reached:
        return replace(report, arguments=replace(given, master_port=int(told)))
    return report
