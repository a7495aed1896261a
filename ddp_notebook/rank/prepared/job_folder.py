"""The files of this user's prepared ranks that other processes read: a folder per process.

A process is identified by its pid and its start time: pids are reused. Ranks of one job have the
same parent; a launcher that starts them again counts its attempts. If a shell starts ranks one by
one, each rank number occurs only once in a job.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from ddp_notebook import files
from ddp_notebook.launch.process_groups import stat_fields
from ddp_notebook.launch.session_folder import is_private, parents
from ddp_notebook.rank.control_socket import connected

FOLDER_VARIABLE = "DDP_NOTEBOOK_FOLDER"
SLURM_JOB = "SLURM_JOB_ID"
"""The variable in which Slurm tells a process its job's number."""
KEPT_JOBS = 5
"""How many ended jobs are kept, the newest ones."""
_ABOUT = "about.json"


@dataclass(frozen=True, slots=True)
class About:
    """A prepared process's description of itself, written when it starts. None: unknown."""

    pid: int
    began: int
    """When it started, in clock ticks since the kernel was booted."""
    parent: int
    parent_began: int
    rank: int
    world_size: int | None
    attempt: int
    script: str
    folder: str
    """Its working directory at that time."""
    host: str
    pids: str
    """Its pid namespace; in another one, pids mean other processes."""
    wall_s: float
    agents_store: bool = False
    """The launcher's agent hosts the store, and no rank does."""
    told: Mapping[str, str] | None = None
    version: int = 1

    @property
    def launched(self) -> tuple[object, ...]:
        """Shared by the ranks of a job on this host, and by all jobs that one shell started."""
        return self.parent, self.parent_began, self.attempt, self.script

    @property
    def launches(self) -> tuple[object, ...]:
        """The key `launched` of the ranks that it starts itself."""
        return self.pid, self.began, self.attempt, self.script

    @property
    def meets(self) -> str:
        """The address of the rendezvous, from its environment."""
        return meeting_point(self.told or {})

    @property
    def alive(self) -> bool:
        """True while the process exists."""
        return self.pids == namespace() and began(self.pid) == self.began


class Process(Protocol):
    """A process that is a rank of some job."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def world_size(self) -> int | None:
        """The number of ranks, if its environment says it."""

    @property
    def launched(self) -> tuple[object, ...]:
        """Equal for all ranks of its job, but for one that starts the others."""

    @property
    def launches(self) -> tuple[object, ...]:
        """The key `launched` of the ranks that it starts itself."""

    @property
    def meets(self) -> str:
        """The address of the rendezvous, as far as known."""


P = TypeVar("P", bound=Process)


def by_job(found: Iterable[P]) -> list[dict[int, P]]:
    """Processes by job and rank; `found` has the oldest first, and so have the jobs.

    From one shell several jobs may be started, each with a rank 0, also at the same time.
    """
    # Two passes, because variables may be wrong, and then that is what the user looks for. First
    # processes that one launcher started, and that were given one address, are a group: a rank
    # number occurs once in a job, so the second rank 0 begins a new one. Then two groups that lack
    # each other's ranks are one job although their addresses differ: a wrong MASTER_PORT on one
    # rank must not make two jobs of which each is only said to lack ranks.
    groups: list[dict[int, P]] = []
    for each in found:
        near = (g for g in groups if each.rank not in g and _alike(g, each))
        group = next((g for g in near if next(iter(g.values())).meets == each.meets), None)
        if group is None:
            groups.append(group := {})
        group[each.rank] = each
    jobs: list[dict[int, P]] = []
    for group in groups:  # a rank that was told another address is in the job that lacks it
        parts = (job for job in jobs if _lacks(job, group))
        other = next((job for job in parts if _alike(job, next(iter(group.values())))), None)
        if other is None:
            jobs.append(group)
        else:
            other.update(group)
    return jobs


def _alike(group: Mapping[int, P], process: P) -> bool:
    """Return True if one process started both, or one the other, as a rank of the same job."""
    return any(
        p.launched == process.launched
        or (p.world_size == process.world_size and (_starts(p, process) or _starts(process, p)))
        for p in group.values()
    )


def _starts(one: Process, other: Process) -> bool:
    return one.launches == other.launched


def _lacks(job: Mapping[int, P], group: Mapping[int, P]) -> bool:
    """True if both jobs lack ranks, and no rank is in both."""
    whole = any(len(of) >= (next(iter(of.values())).world_size or 0) for of in (job, group))
    return not whole and not job.keys() & group.keys()


def meeting_point(told: Mapping[str, str]) -> str:
    """The address of the rendezvous that a launcher's variables name."""
    return f"{told.get('MASTER_ADDR', '')}:{told.get('MASTER_PORT', '')}"


def root() -> Path:
    """The folder of this user's prepared processes; it may not be there."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else parents()[0] / f"ddp-notebook-jobs-{os.getuid()}"


def make(about: About, folder: Path | None = None) -> Path | None:
    """A folder for a process, in `folder` or `root()`; None if it cannot be made private."""
    folder = folder or root()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_private(folder):
        return None
    own = folder / f"{about.pid}-{about.began}"
    # The start time is in the name: a pid that is used again gets a folder of its own.
    own.mkdir(mode=0o700, exist_ok=True)  # it may run another program now (exec)
    write(own / _ABOUT, asdict(about))
    return own


def write(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON atomically: readers see all of it or none."""
    beside = unfinished(path)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump(content, stream)
    beside.replace(path)


def unfinished(path: Path) -> Path:
    """Return the file that `write` leaves in place of `path` where it was cut short."""
    return path.with_suffix(".new")


def read(path: Path, most_bytes: int) -> dict[str, object]:
    """The JSON that `write` wrote; empty if it is missing or no JSON."""
    try:
        with files.opened(path) as stream:
            value = json.loads(stream.read(most_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def processes(folder: Path | None = None) -> list[tuple[About, Path]]:
    """The prepared processes in `folder`, by default this user's, with their own; oldest first."""
    folder = folder or root()
    if not is_private(folder):
        return []
    import msgspec  # not at the top: a rank that starts loads it only in the thread of `sweep`

    found = []
    for own in sorted(folder.iterdir())[:10_000]:
        if is_private(own):
            with contextlib.suppress(msgspec.ValidationError):  # it is anything else
                about = msgspec.convert(read(own / _ABOUT, 1 << 16), About)
                if about.version == 1:
                    found.append((about, own))
    return sorted(found, key=lambda each: each[0].wall_s)


def in_another_container(about: About, own: Path) -> bool:
    """Return True if a process of another pid namespace runs: it listens in its folder."""
    if about.pids == namespace():
        return False
    with contextlib.suppress(OSError):
        connected(own / "ask").close()
        return True
    return False


def sweep() -> None:
    """Remove the folders of all jobs that have ended, but for the newest."""
    known = processes()
    folders = {(about.pid, about.began): own for about, own in known}
    jobs = by_job(about for about, _ in known)
    run = {(a.pid, a.began) for a, own in known if a.alive or in_another_container(a, own)}
    ended = [of for of in jobs if not run & {(about.pid, about.began) for about in of.values()}]
    for of in ended[: max(0, len(ended) - KEPT_JOBS)]:
        for about in of.values():
            folder = folders[about.pid, about.began]
            # Last what says whose it is: the next one finds it if this process ends meanwhile.
            with contextlib.suppress(OSError):
                for path in set(folder.iterdir()) - {folder / _ABOUT}:
                    path.unlink()
            shutil.rmtree(folder, ignore_errors=True)


# -- processes -------------------------------------------------------------------------------


def began(pid: int) -> int:
    """When a process began, in ticks since the kernel was booted; 0 if there is no such process."""
    try:
        state, *rest = stat_fields(Path(f"/proc/{pid}/stat"))
    except OSError:
        return 0
    # Field 22 of proc(5), the start time; the state is field 3.
    return 0 if state == "Z" else int(rest[18])


def waited_for_by(pid: int) -> int:
    """The parent of a process that has ended and that it has not waited for; 0 of any other."""
    try:
        state, parent, *_ = stat_fields(Path(f"/proc/{pid}/stat"))
    except OSError:
        return 0
    return int(parent) if state == "Z" else 0


def exit_code(about: About) -> int | None:
    """How a process ended: negative for a signal. None where it runs, or its parent has asked."""
    try:
        state, *rest = stat_fields(Path(f"/proc/{about.pid}/stat"))
        ended = state == "Z" and int(rest[18]) == about.began and about.pids == namespace()
        # Field 52 of proc(5), as waitpid(2) gives it; 0 for whoever may not trace the process.
        return os.waitstatus_to_exitcode(int(rest[48])) if ended else None
    except (OSError, ValueError, IndexError):
        return None


def namespace() -> str:
    """Return the pid namespace of this process; empty where the system has no such things."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
