"""Ranks that were started without DDP_NOTEBOOK=1: known by their environment, from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddp_notebook.rank.prepared import job_folder

_MOST_BYTES = 1 << 20
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


def job_of(pid: int, prepared: frozenset[int]) -> dict[int, Seen] | None:
    """The ranks of the job of a process, a rank or the launcher; None where it is neither."""
    for ranks in jobs(prepared):
        if pid in {each.pid for each in ranks.values()} | {each.parent for each in ranks.values()}:
            return ranks
    return None


def jobs(prepared: frozenset[int]) -> list[dict[int, Seen]]:
    """The ranks by launcher, the newest job first; without those of the pids in `prepared`.

    Ranks of which none has loaded torch are no job.
    """
    seen = {each.pid: each for each in _ranks() if each.pid not in prepared}
    found: dict[tuple[int, str], dict[int, Seen]] = {}
    for each in seen.values():
        above = seen.get(each.parent)
        started_by_a_rank = each.parent in prepared or (above and above.rank == each.rank)
        if not started_by_a_rank:  # a worker of a loader, say: it inherits what the rank was told
            found.setdefault((each.parent, each.script), {})[each.rank] = each
    with_torch = (of for of in found.values() if any(each.torch for each in of.values()))
    ranks = [dict(sorted(of.items())) for of in with_torch]
    return sorted(ranks, key=lambda of: -min(each.began_s for each in of.values()))


def how_to_see(pid: int) -> str:
    """What shows the stacks of such a process, without pausing it."""
    return f"py-spy dump --nonblocking --pid {pid}"


def was_set(pid: int) -> bool:
    """True of a process of this user's that began with DDP_NOTEBOOK=1."""
    try:
        return "DDP_NOTEBOOK=1" in _read(pid, "environ").split("\0")
    except OSError:
        return False


def has_torch(pid: int) -> bool:
    """True of a process of this user's that has loaded torch."""
    try:
        return "libtorch" in _read(pid, "maps", 1 << 24)
    except OSError:
        return False


def untold(pid: int) -> tuple[int, ...]:
    """Processes with torch that a process has started, and that were told no rank when they began.

    So are those of ``mp.spawn``: they set their own environment, which cannot be seen.
    """
    try:
        words = _read(pid, f"task/{pid}/children").split()
        return tuple(n for n in map(int, words) if has_torch(n) and not _environment(n))
    except (OSError, ValueError):
        return ()


def _ranks() -> Iterator[Seen]:
    try:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    except OSError:
        return  # not Linux
    for pid in pids[:_MOST_PROCESSES]:
        try:
            told = _environment(pid)
            state, parent = _read(pid, "stat").rpartition(")")[2].split()[:2]
            if told and pid != os.getpid() and state != "Z":
                yield Seen(
                    pid,
                    int(parent),
                    int(told["RANK"]),
                    int(told["WORLD_SIZE"]),
                    _script(pid),
                    _began_s(pid),
                    told,
                    has_torch(pid),
                )
        except (OSError, ValueError, IndexError):  # another user's, or it ended meanwhile
            continue


_NUMBERS = ("RANK", "WORLD_SIZE")
_TOLD = (
    *("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    "TORCHELASTIC_USE_AGENT_STORE",
)


def _environment(pid: int) -> Mapping[str, str]:
    """What a launcher told it, as it was when it began; empty where that is no rank."""
    lines = _read(pid, "environ").split("\0")
    values = {name: value for name, _, value in (line.partition("=") for line in lines)}
    numbers = {name: values.get(name, "")[:9] for name in _NUMBERS}
    if not all(text.isascii() and text.isdigit() for text in numbers.values()):
        return {}
    return {**{name: values[name] for name in _TOLD if name in values}, **numbers}


def _script(pid: int) -> str:
    words = _read(pid, "cmdline").split("\0")[1:]
    named = (word for word in words if word.endswith(".py"))
    module = words[words.index("-m") + 1 : words.index("-m") + 2] if "-m" in words else []
    return next(named, next(iter(module), ""))


def _began_s(pid: int) -> float:
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
    return int(boot.split()[1]) + job_folder.began(pid) / os.sysconf("SC_CLK_TCK")


def _read(pid: int, name: str, most_bytes: int = _MOST_BYTES) -> str:
    with Path(f"/proc/{pid}/{name}").open("rb") as stream:
        return stream.read(most_bytes).decode(errors="replace")
