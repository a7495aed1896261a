"""Python stacks of running processes, read by py-spy, and what each rank does by its stack.

py-spy pauses no process and runs no code in it. A stack does not show which collectives were issued
before, nor in which group: that stays unknown.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_notebook.diagnosis.collectives.describe import named
from ddp_notebook.jobs.frames import Frame, Sources, function_called
from ddp_notebook.model import (
    DEFAULT_GROUP,
    Activity,
    CallFacts,
    Collective,
    GroupMade,
    InitArguments,
    Part,
    Place,
    RankReport,
    cut,
)
from ddp_notebook.rank.inspect.frames import GROUP_FUNCTIONS, STORE_FUNCTIONS, WAITING_IN
from ddp_notebook.rank.prepared import processes

_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread of Python's: its frames, the innermost first, and the variables of each, as text."""

    name: str
    main: bool
    frames: tuple[Frame, ...] = ()
    variables: tuple[Mapping[str, str], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Stacks:
    """The stacks by process, and why those of others could not be read, a line each."""

    of: Mapping[int, tuple[Thread, ...]]
    why_not: tuple[str, ...] = ()


def command() -> str | None:
    """Return where py-spy is: beside this Python, or on the path; None if not installed."""
    return shutil.which("py-spy", path=Path(sys.executable).parent) or shutil.which("py-spy")


def read(pids: Iterable[int]) -> Stacks:
    """Read the stacks of processes, all at about the same time."""
    program = command()
    if program is None:
        return Stacks({}, (_NOT_INSTALLED,))
    # Without --nonblocking py-spy would stop the process while it reads, and a job of others is not
    # to be paused. So one that computes may be read while its frames change. Then py-spy gives up,
    # and is asked once more; what it reads all the same may be wrong, so nothing is said of a rank
    # whose stack is not the same in two looks.
    words = [program, "dump", "--nonblocking", "--locals", "--json", "--pid"]
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    found: dict[int, tuple[Thread, ...]] = {}
    why_not: dict[int, str] = {}
    unread = tuple(pids)
    for _attempt in range(2):
        started = {
            pid: subprocess.Popen([*words, str(pid)], stdin=none, stdout=pipe, stderr=pipe)
            for pid in unread
        }
        until_s = time.monotonic() + 20.0  # of all: they run at the same time
        for pid, process in started.items():
            try:
                output, error = process.communicate(timeout=max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                output, error = b"", b"it took too long"
            if threads := parse(output, pid):
                found[pid] = threads
                why_not.pop(pid, None)
            else:
                why_not[pid] = _reason(pid, error.decode(errors="replace"))
        unread = tuple(pid for pid, why in why_not.items() if _MAY_CHANGE in why)
    return Stacks(found, tuple(dict.fromkeys(why_not.values())))


_MAY_CHANGE = "py-spy could not read"
_NOT_INSTALLED = (
    "py-spy is not installed, so Python stacks cannot be read. Install it: pip install py-spy"
)


def _reason(pid: int, error: str) -> str:
    """Say why py-spy read nothing, and what would let it."""
    lower = error.lower()
    if "permission denied" in lower or "operation not permitted" in lower:
        try:
            scope = _PTRACE.read_text().strip()
        except OSError:
            scope = "0"
        rights = "Run ddp-notebook as root; in a container, start that with --cap-add=SYS_PTRACE"
        if scope in ("1", "2"):
            rights = (
                f"kernel.yama.ptrace_scope is {scope} here. As root: sysctl "
                "kernel.yama.ptrace_scope=0 (or run ddp-notebook as root)"
            )
        return f"py-spy may not read the ranks' processes. {rights}"
    gone = ("no such process", "failed to find process", "no such file")
    if any(words in lower for words in gone):
        return f"process {pid} has ended meanwhile"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    # Below its reasons stands a stack of its own.
    reasons = list(itertools.takewhile(lambda line: not line.startswith("Stack backtrace"), lines))
    words = " ".join(line.removeprefix("Error: ") for line in reasons)
    return f"{_MAY_CHANGE} process {pid}: {cut(words, 200) or 'no stack'}"


def parse(output: bytes, pid: int) -> tuple[Thread, ...]:
    """Return the threads in what py-spy printed; none where that is nothing of the kind."""
    try:
        rows = json.loads(output[: 16 << 20])
    except (ValueError, RecursionError):
        return ()
    main = [pid]
    with contextlib.suppress(OSError):  # py-spy has the numbers of the process's own namespace
        main.append(processes.in_its_container(pid)[0])
    threads = []
    for row in _dicts(rows):
        frames, variables = [], []
        for each in _dicts(row.get("frames")):
            if not isinstance(each.get("line"), int):
                continue
            # A function is named with those around it; the record of torch has its own name alone.
            name = str(each.get("name", "")).rpartition(".")[2]
            frames.append(Frame(cut(str(each.get("filename", "")), 1000), each["line"], name))
            own = _dicts(each.get("locals"))
            variables.append({str(v.get("name")): cut(str(v.get("repr")), 200) for v in own})
        name = cut(str(row.get("thread_name") or ""), 100)
        number = row.get("os_thread_id")
        is_main = number in main if number else name == "MainThread"
        threads.append(Thread(name, is_main, tuple(frames), tuple(variables)))
    return tuple(threads)


def _dicts(value: object) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


# -- as the report that a rank would give ----------------------------------------------------

UNKNOWN_GROUP = "?"
"""The group of a collective that was given one: the stack does not tell which."""
_C10D = "torch/distributed/distributed_c10d.py"
_RENDEZVOUS = "torch/distributed/rendezvous.py"
_DDP = "torch/nn/parallel/distributed.py"
_ENGINE = "torch/autograd/graph.py"
_LOGGER = "torch/distributed/c10d_logger.py"
_MAY_NAME_GROUP = re.compile(r"ProcessGroup|\"group\": (?!None)|…|\.\.\.")
"""Matches a group among arguments, and where py-spy has cut them: a group may have stood there."""
_MESH = "torch/distributed/device_mesh.py"
_NEW_GROUP, _DDP_INIT = "new_group", "DDP constructor"
_IN_SET_UP = ("store", "process-group", _NEW_GROUP)
_WITH_ARGUMENTS = (*STORE_FUNCTIONS, *GROUP_FUNCTIONS, "init_process_group")
_PEER = {"send": ("dst", "group_dst"), "recv": ("src", "group_src")}
_LIST = re.compile(r"\[\d{1,7}(, \d{1,7})*\]")


def report_of(
    rank: int, threads: Sequence[Thread], sources: Sources, still: bool
) -> tuple[RankReport, Collective | None]:
    """Return the report of a rank whose Python stacks these are, and the collective in which it
    waits, where it waits in one.

    `still` is true where its whole process was seen to do nothing between two looks, and waits
    for no GPU: only then a rank in ``backward`` is said to wait for others.
    """
    main = next((thread for thread in threads if thread.main), None)
    if main is None or not main.frames:
        return RankReport(rank, doing="none of its Python code is on its main thread"), None
    path = sources.path(main.frames)
    inside = _inside(main.frames)
    known = RankReport(rank, Activity.BUSY, doing=str(path[-1]) if path else "", path=path)
    if inside in _IN_SET_UP:
        return _in_set_up(known, main, inside), None
    innermost = main.frames[0]
    # A rank in `backward` has the same Python stack whether it computes or waits in a bucket's
    # all_reduce: both are in C++. What tells them apart is that nothing of the process moved; and
    # on a GPU not even that does.
    in_backward = innermost.file.endswith(_ENGINE) and "backward" in innermost.function
    if not inside and not (still and in_backward):
        return known, None
    record = _record(rank, main, path, inside)
    known = replace(
        known,
        activity=Activity.WAITING,
        inside="ddp" if inside == _DDP_INIT else "collective",
        doing=named(record),
        entered=1,
        left=1,
        initialized=True,
    )
    return known, record


def _torchs(main: Thread) -> Iterator[tuple[Frame, Mapping[str, str]]]:
    """Return the frames below the user's innermost one, with their variables, innermost first."""
    for frame, variables in zip(main.frames, main.variables, strict=True):
        if frame.users:
            return
        yield frame, variables


def _inside(frames: Iterable[Frame]) -> str:
    """Return what torch's frames wait in: a part of setup, or a collective; empty for neither."""
    own = list(itertools.takewhile(lambda frame: not frame.users, frames))
    rendezvous, c10d, ddp = (
        [frame.function for frame in own if frame.file.endswith(file)]
        for file in (_RENDEZVOUS, _C10D, _DDP)
    )
    if set(rendezvous) & set(STORE_FUNCTIONS):
        return "store"
    if _NEW_GROUP in c10d:  # it is made by the same function as the first group
        return _NEW_GROUP
    if set(c10d) & set(GROUP_FUNCTIONS):
        return "process-group"
    if "__init__" in ddp:
        return _DDP_INIT
    return next((name for name in c10d if name in WAITING_IN), "")


def _in_set_up(known: RankReport, main: Thread, inside: str) -> RankReport:
    """Return the report of a rank that makes a group, with the arguments in its variables."""
    given: dict[str, str] = {}
    of_mesh = False
    for frame, variables in _torchs(main):
        of_mesh = of_mesh or frame.file.endswith(_MESH)
        in_c10d = frame.file.endswith(_C10D)
        if in_c10d if inside == _NEW_GROUP else frame.function in _WITH_ARGUMENTS:
            given = {**variables, **given}  # the innermost has them as they are used
    waits = replace(known, activity=Activity.WAITING, inside="process-group", entered=1)
    if inside == _NEW_GROUP:
        # Which group it is, where the stack says that: torch names it by a number.
        number = _number(given.get("group_name", "").strip("'\""))
        ranks = given.get("global_ranks_in_group", "")
        waits = replace(waits, left=1, initialized=True)
        if number is None or not _LIST.fullmatch(ranks):
            return waits
        members = tuple(map(int, re.findall(r"\d+", ranks)))
        made = GroupMade(number, members, path=known.path, of_mesh=of_mesh)
        return replace(waits, groups_made=(made,))
    backend = given.get("backend", "").strip("'\"")
    arguments = InitArguments(
        rank=_number(given.get("group_rank", given.get("rank"))),
        world_size=_number(given.get("group_size", given.get("world_size"))),
        master_addr=given.get("hostname", "").strip("'\""),
        master_port=_number(given.get("port")),
        backend="" if backend == "None" else backend,
    )
    return replace(waits, inside=inside, arguments=arguments)


def _record(rank: int, main: Thread, path: tuple[Place, ...], inside: str) -> Collective:
    """Return the collective that the stack shows, as its rank's first: its number is unknown."""
    api, part = function_called(main.frames)
    operation = inside
    if inside == _DDP_INIT:
        operation, part = "all_gather", Part.CONSTRUCTOR
    elif not inside:
        operation, part, api = "all_reduce", Part.BACKWARD, "backward"
    given = next((own for frame, own in _torchs(main) if frame.function == operation), {})
    # A call that was given no group has the default group in its variable, and so looks like one
    # with a group. But torch wraps its functions in a logger, whose frame stands just outside of
    # the function's and has what the user gave.
    handed = next(
        (
            f"{own.get('args', '…')} {own.get('kwargs', '…')}"
            for (called, _), (frame, own) in itertools.pairwise(_torchs(main))
            if called.function == operation and frame.file.endswith(_LOGGER)
        ),
        "…",
    )
    in_default = part is not None or not _MAY_NAME_GROUP.search(handed)
    peer = next((_number(given[name]) for name in _PEER.get(operation, ()) if name in given), None)
    return Collective(
        rank,
        0,
        operation,
        group=DEFAULT_GROUP if in_default else UNKNOWN_GROUP,
        api=api or operation,
        part=part,
        peer=peer,
        path=path,
        call=CallFacts(waited=True),
    )


def _number(text: str | None) -> int | None:
    """Return a number that py-spy wrote; None for anything else, as torch's -1 for not given."""
    return int(text) if text is not None and text.isascii() and text[:9].isdigit() else None
