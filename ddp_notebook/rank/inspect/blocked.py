"""For which lock, file or pipe a thread of this process waits, as the system sees it.

Python's frames end where C++ begins. The innermost return addresses on the thread's stack tell
whether torch waits, or Python for a lock of the user's.
"""

from __future__ import annotations

import contextlib
import os
import platform
import stat
import struct
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

from ddp_notebook.launch.process_groups import is_running

_FUTEX_OF = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
FUTEX = _FUTEX_OF.get(platform.machine(), -1)
"""The number of the system call in which a thread waits for a lock; -1 if not known."""
_X86, _OTHERS = (73, 72, 257, 0, 1), (32, 25, 56, 63, 64)
_FLOCK, _FCNTL, _OPENAT, READ, WRITE = _X86 if platform.machine() == "x86_64" else _OTHERS
"""The numbers of the system calls in which a thread waits for a file, or at a pipe."""
_SET_AND_WAIT = (7, 38)
"""F_SETLKW and F_OFD_SETLKW: the orders to fcntl that wait for a lock."""
_LONGEST_PATH = 4096
_PRIVATE = 128
"""The flag of a futex that only threads of the same process can wake."""
_NO_LIMIT = 0
_LOOK_AT_BYTES = 1024
"""Bytes of its stack to read: the frames between the system call and its caller take some 300."""
_LOOK_AT_CALLERS = 3
_BETWEEN = ("libc.", "libc-", "libpthread", "libstdc++", "libc++", "ld-", "[vdso]")
"""Libraries through which others wait: not the ones that wait."""
_TORCHS = ("libtorch", "libc10", "libgloo")


def in_torch(native_id: int) -> bool | None:
    """True if a thread waits for a lock in torch's C++, False if it waits elsewhere.

    None if it runs, or if it is not known.
    """
    names = _callers(native_id)
    return sum(name.startswith(_TORCHS) for name in names) * 2 > len(names) if names else None


def for_ever(native_id: int, *, shared: bool = False) -> bool:
    """True if a thread waits without a limit for a lock that this process must release.

    With `shared` also for one that other processes may release.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return waits_for_ever(Path(f"/proc/self/task/{native_id}"), shared=shared)
    return False


def waits_for_ever(task: Path, *, shared: bool = False) -> bool:
    """The same of any thread, by its folder in /proc. Raises OSError, ValueError, IndexError.

    With `shared` also for a lock that other processes can release, as multiprocessing's.
    """
    number, *arguments = (task / "syscall").read_text().split()
    if int(number) != FUTEX:
        return False
    own = shared or bool(int(arguments[1], 16) & _PRIVATE)
    return own and int(arguments[3], 16) == _NO_LIMIT


def call(pid: int | str, native_id: int) -> tuple[int, list[int]]:
    """The system call in which a thread waits, and its arguments; -1 if it runs, or not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        number, *arguments = Path(f"/proc/{pid}/task/{native_id}/syscall").read_text().split()
        return int(number), [int(argument, 16) for argument in arguments]
    return -1, []


def file_lock(native_id: int) -> str:
    """The file for whose lock a thread waits, as a path in /proc: it may have been deleted.

    Empty if it waits for none.
    """
    number, arguments = call("self", native_id)
    waits = number == _FLOCK or (number == _FCNTL and arguments[1] in _SET_AND_WAIT)
    return f"/proc/self/fd/{arguments[0]}" if waits else ""


def fifo(native_id: int) -> str:
    """The FIFO that a thread is opening: it waits for another process that does, too."""
    number, arguments = call("self", native_id)
    if number != _OPENAT:
        return ""
    with contextlib.suppress(OSError, ValueError):
        memory = os.open("/proc/self/mem", os.O_RDONLY)
        try:
            data = os.pread(memory, _LONGEST_PATH, arguments[1])
        finally:
            os.close(memory)
        path = os.fsdecode(data.partition(b"\0")[0])
        return path if stat.S_ISFIFO(os.stat(path).st_mode) else ""  # noqa: PTH116  # as opened
    return ""


def opened(pid: int | str, descriptor: int) -> str:
    """What is open under a number in a process: a path, or ``pipe:[1234]``; empty if unknown."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH115  # not always a path
    return ""


def holder(path: str) -> int:
    """The process that holds a lock on a file; 0 if there is none, or it is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        inode = str(os.stat(path).st_ino)  # noqa: PTH116  # a path of /proc
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] != "->" and fields[5].rpartition(":")[2] == inode:
                return int(fields[4])
    return 0


def has_children(*but: int, living: bool = False) -> bool:
    """True if this process has started others that are still there, or it is not known.

    With `living` without those that have ended, and were not asked yet how.
    """
    with contextlib.suppress(OSError):
        tasks = Path("/proc/self/task").iterdir()
        pids = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
        return any(is_running(pid) or not living for pid in pids - set(but))
    return True


def at_pipe_of_ours(pid: int, numbers: tuple[int, ...]) -> bool:
    """True if a process waits in one of these calls at a pipe, of which this one has an end."""
    number, arguments = call(pid, pid)
    pipe = opened(pid, arguments[0]) if number in numbers else ""
    if not pipe.startswith("pipe:"):
        return False
    wanted = os.O_WRONLY if number == READ else os.O_RDONLY
    with contextlib.suppress(OSError):
        return any(
            opened("self", int(path.name)) == pipe and _mode("self", path.name) == wanted
            for path in Path("/proc/self/fd").iterdir()
        )
    return False


def _mode(pid: int | str, descriptor: str) -> int:
    """Whether something is open for reading, for writing or for both; -1 if not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        flags = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().partition("flags:")[2]
        return int(flags.split()[0], 8) & os.O_ACCMODE
    return -1


def times_run(native_ids: Iterable[int]) -> tuple[int, ...]:
    """How often each of these threads of this process has begun to run; -1 for one that is gone."""
    return tuple(map(_times_run, native_ids))


def _times_run(native_id: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[2])
    return -1


def _callers(native_id: int) -> list[str]:
    """The libraries of the innermost waiting functions; empty if not known.

    Values left on the stack by earlier calls may look like return addresses, so several are read.
    The system call itself is in libc, and so is the first address.
    """
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        number, arguments = call("self", native_id)
        if number != FUTEX:
            return []
        code = _code()
        found = [name for address in _words(arguments[-2]) if (name := _name(address, *code))]
        between = [name.startswith(_BETWEEN) for name in found]
        begin = between.index(True)
        names = [name for name in found[begin:] if not name.startswith(_BETWEEN)]
    return names[:_LOOK_AT_CALLERS]


def _name(address: int, begins: list[int], ends: list[int], names: list[str]) -> str:
    """The file whose code is at `address`; empty for no code."""
    at = bisect_right(begins, address) - 1
    return names[at] if at >= 0 and address < ends[at] else ""


def _words(stack_pointer: int) -> tuple[int, ...]:
    """The top of a stack. Read as a file: an address that is no longer mapped raises OSError."""
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        data = os.pread(memory, _LOOK_AT_BYTES, stack_pointer)
    finally:
        os.close(memory)
    return struct.unpack(f"{len(data) // 8}Q", data[: len(data) // 8 * 8])


def _code() -> tuple[list[int], list[int], list[str]]:
    """Where code is in memory: the start and end addresses in order, and the files' names."""
    begins, ends, names = [], [], []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(None, 5)
        if "x" in fields[1] and len(fields) > 5:
            begin, _, end = fields[0].partition("-")
            begins.append(int(begin, 16))
            ends.append(int(end, 16))
            names.append(fields[5].rpartition("/")[2])
    return begins, ends, names
