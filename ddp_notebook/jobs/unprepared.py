"""Ranks that were started without DDP_NOTEBOOK=1: known by their environment, from outside."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from ddp_notebook.launch.process_groups import stat_fields
from ddp_notebook.rank.prepared import job_folder, processes
from ddp_notebook.rank.prepared.processes import has_torch, read
from ddp_notebook.views.ansi import plain

_MOST_PROCESSES = 10_000


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
        """The same for all ranks of a job, and of all that one shell has started."""
        return self.parent, self.script

    @property
    def launches(self) -> tuple[object, ...]:
        """What `launched` is of the ranks that it starts itself."""
        return self.pid, self.script

    @property
    def meets(self) -> str:
        """Where it was told to meet the other ranks."""
        return job_folder.meeting_point(self.told)


def job_of(pid: int, prepared: frozenset[int]) -> dict[int, Seen] | None:
    """The ranks of the job of a process, a rank or the launcher; None where it is neither."""
    for ranks in jobs(prepared):
        if pid in {process.pid for process in ranks.values()} | {
            process.parent for process in ranks.values()
        }:
            return ranks
    return None


def jobs(prepared: frozenset[int]) -> list[dict[int, Seen]]:
    """The ranks by launcher, the newest job first; without those of the pids in `prepared`.

    Ranks of which none has loaded torch are no job.
    """
    found = job_folder.by_job(_only_ranks(list(_told()), prepared))
    with_torch = (of for of in found if any(process.torch for process in of.values()))
    ranks = [dict(sorted(of.items())) for of in with_torch]
    return sorted(ranks, key=lambda of: -min(process.began_s for process in of.values()))


def _only_ranks(seen: Sequence[Seen], prepared: frozenset[int]) -> Iterator[Seen]:
    """Those that are ranks, the oldest first, of all that were told to be one.

    What a rank starts, as the workers of a loader, inherits what it was told. A shell around a
    rank was told the same, and torchrun that a scheduler has started is no rank either.
    """
    of = {process.pid: process for process in seen}
    around = _around(seen, of)
    for process in sorted(seen, key=lambda each: each.began_s):
        above = None if process.parent in around else of.get(process.parent)
        inherits = above is not None and above.rank == process.rank
        if (
            not inherits
            and not {process.pid, process.parent} & prepared
            and process.pid not in around
        ):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                yield replace(process, parent=processes.launcher(process.pid))


def _around(seen: Sequence[Seen], of: Mapping[int, Seen]) -> frozenset[int]:
    """Those that stand above ranks and are none."""
    shells = {pid for process in seen if process.torch for pid in processes.around(process.pid)}
    told = (of.get(process.parent) for process in seen if not process.scheduled)
    return frozenset(shells | {above.pid for above in told if above and above.scheduled})


def how_to_see(pid: int) -> str:
    """What shows the stacks of such a process, without pausing it."""
    return f"py-spy dump --nonblocking --pid {pid}"


def was_set(pid: int) -> bool:
    """True of a process of this user's that began with DDP_NOTEBOOK=1."""
    try:
        return processes.environment(pid).get("DDP_NOTEBOOK") == "1"
    except OSError:
        return False


def elsewhere(pid: int) -> str:
    """That a process has a record for others, or in another folder than here; empty if not so."""
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


def stopped(launcher: int, absent: Sequence[int], known: frozenset[int]) -> dict[int, int]:
    """The processes of absent ranks that a signal stopped before they were prepared, by rank.

    Their environment says which rank they are. One of ``mp.spawn`` was told none when it began: it
    is the rank that is absent where that is one alone. `known` are pids of other ranks.
    """
    found: dict[int, int] = {}
    untold_ranks = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(launcher).children(recursive=True):
            if process.pid in known or process.status() != psutil.STATUS_STOPPED:
                continue
            with contextlib.suppress(OSError):
                told = processes.launch_parameters(processes.environment(process.pid))
                if told is not None and told.rank in absent:
                    found.setdefault(told.rank, process.pid)
                elif told is None and process.ppid() == launcher and _is_spawned(process.pid):
                    untold_ranks.append(process.pid)
    if not found and len(absent) == len(untold_ranks) == 1:
        found[absent[0]] = untold_ranks[0]
    return found


def _is_spawned(pid: int) -> bool:
    """True of a process that multiprocessing started anew, and that is no helper of its own."""
    return "multiprocessing.spawn" in read(pid, "cmdline")


def untold(pid: int) -> tuple[int, ...]:
    """Processes with torch that a process has started, and that were told no rank when they began.

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
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    except OSError:
        return  # not Linux
    for pid in pids[:_MOST_PROCESSES]:
        try:
            values = processes.environment(pid)
            rank = processes.launch_parameters(values)
            state, parent = stat_fields(Path(f"/proc/{pid}/stat"))[:2]
            if rank is not None and pid != os.getpid() and state != "Z":
                yield Seen(
                    pid,
                    int(parent),
                    rank.rank,
                    rank.world_size,
                    _script(pid),
                    _began_s(pid),
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


def _script(pid: int) -> str:
    words = read(pid, "cmdline").split("\0")[1:]
    named = (word for word in words if word.endswith(".py"))
    module = words[words.index("-m") + 1 : words.index("-m") + 2] if "-m" in words else []
    return next(named, next(iter(module), ""))


def _began_s(pid: int) -> float:
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
    return int(boot.split()[1]) + job_folder.began(pid) / os.sysconf("SC_CLK_TCK")
