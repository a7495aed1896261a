"""Python stacks of running processes, read by py-spy: it pauses nothing and runs nothing there."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_notebook.evidence.frames import Frame
from ddp_notebook.model import cut
from ddp_notebook.rank.prepared.processes import in_its_container

_TIMEOUT_S = 20.0
_MOST_BYTES = 16 << 20
_LONGEST = 1000
_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")
_DENIED = ("permission denied", "operation not permitted")
_GONE = ("no such process", "failed to find process", "no such file")


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread of Python's: its frames, the innermost first, and the variables of each, as text."""

    name: str
    main: bool
    frames: tuple[Frame, ...] = ()
    variables: tuple[Mapping[str, str], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Stacks:
    """What could be read, by process; of the others, why not, a line each."""

    of: Mapping[int, tuple[Thread, ...]]
    why_not: tuple[str, ...] = ()


def command() -> str | None:
    """Where py-spy is: beside this Python, or on the path; None where it is not installed."""
    return shutil.which("py-spy", path=Path(sys.executable).parent) or shutil.which("py-spy")


def read(pids: Iterable[int]) -> Stacks:
    """The stacks of processes, all read at about the same time."""
    pids = tuple(pids)
    program = command()
    if program is None:
        return Stacks({}, (_NOT_INSTALLED,))
    found, why_not = _read_once(program, pids)
    again = [pid for pid, why in why_not.items() if _MAY_CHANGE in why]
    if again:  # it read while the process ran on
        more, why_not_more = _read_once(program, again)
        found.update(more)
        why_not = {
            pid: why_not_more.get(pid, why) for pid, why in why_not.items() if pid not in more
        }
    return Stacks(found, tuple(dict.fromkeys(why_not.values())))


_MAY_CHANGE = "py-spy could not read"


def _read_once(
    program: str, pids: Iterable[int]
) -> tuple[dict[int, tuple[Thread, ...]], dict[int, str]]:
    """The stacks that could be read; of the other processes, why not."""
    started = {pid: _start(program, pid) for pid in pids}
    until_s = time.monotonic() + _TIMEOUT_S
    found: dict[int, tuple[Thread, ...]] = {}
    why_not: dict[int, str] = {}
    for pid, process in started.items():
        try:
            output, error = process.communicate(timeout=max(0.1, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            output, error = b"", b"it took too long"
        if threads := parse(output, pid):
            found[pid] = threads
        else:
            why_not[pid] = _reason(pid, error.decode(errors="replace"))
    return found, why_not


_NOT_INSTALLED = (
    "py-spy is not installed, so Python stacks cannot be read. Install it: pip install py-spy"
)


def _start(program: str, pid: int) -> subprocess.Popen[bytes]:
    # Without --nonblocking py-spy would pause the process while it reads.
    words = [program, "dump", "--nonblocking", "--locals", "--json", "--pid", str(pid)]
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _reason(pid: int, error: str) -> str:
    """Why py-spy read nothing, and what would let it."""
    lower = error.lower()
    if any(word in lower for word in _DENIED):
        return f"py-spy may not read the ranks' processes. {_rights()}"
    if any(word in lower for word in _GONE):
        return f"process {pid} has ended meanwhile"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    # Below its reasons stands a stack of its own.
    reasons = list(itertools.takewhile(lambda line: not line.startswith("Stack backtrace"), lines))
    words = " ".join(line.removeprefix("Error: ") for line in reasons)
    return f"{_MAY_CHANGE} process {pid}: {cut(words, 200) or 'no stack'}"


def _rights() -> str:
    """What would give the right, in a line."""
    try:
        scope = _PTRACE.read_text().strip()
    except OSError:
        scope = "0"
    if scope in ("1", "2"):
        return (
            f"kernel.yama.ptrace_scope is {scope} here. As root: sysctl kernel.yama.ptrace_scope=0"
            " (or run ddp-notebook as root)"
        )
    return "Run ddp-notebook as root; in a container, start that with --cap-add=SYS_PTRACE"


def parse(output: bytes, pid: int) -> tuple[Thread, ...]:
    """The threads in what py-spy printed; none where that is nothing of the kind."""
    try:
        rows = json.loads(output[:_MOST_BYTES])
    except (ValueError, RecursionError):
        return ()
    main = [pid]
    with contextlib.suppress(OSError):
        main.append(in_its_container(pid)[0])  # py-spy has numbers of the process's own namespace
    return tuple(_thread(row, main) for row in _rows(rows))


def _rows(value: object) -> list[dict[str, Any]]:
    """The objects in a list of JSON; none where it is no list."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _thread(row: Mapping[str, Any], main_threads: Container[int]) -> Thread:
    frames, variables = [], []
    for each in _rows(row.get("frames")):
        if not isinstance(each.get("line"), int):
            continue
        # A function is named with those around it; the record of torch has its own name alone.
        name = str(each.get("name", "")).rpartition(".")[2]
        frames.append(Frame(cut(str(each.get("filename", "")), _LONGEST), each["line"], name))
        own = _rows(each.get("locals"))
        variables.append({str(v.get("name")): cut(str(v.get("repr")), 200) for v in own})
    name = cut(str(row.get("thread_name") or ""), 100)
    number = row.get("os_thread_id")
    main = number in main_threads if number else name == "MainThread"
    return Thread(name, main, tuple(frames), tuple(variables))
