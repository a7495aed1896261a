"""In which library a thread of this process waits for a lock, as the system sees it.

Python's frames end where C++ begins. The innermost return addresses on the thread's stack tell
whether torch waits, or Python for a lock of the user's.
"""

from __future__ import annotations

import contextlib
import os
import platform
import struct
from bisect import bisect_right
from pathlib import Path

_FUTEX_OF = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
FUTEX = _FUTEX_OF.get(platform.machine(), -1)
"""The number of the system call in which a thread waits for a lock; -1 if not known."""
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


def for_ever(native_id: int) -> bool:
    """True if a thread waits without a limit for a lock that this process must release."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return waits_for_ever(Path(f"/proc/self/task/{native_id}"))
    return False


def waits_for_ever(task: Path) -> bool:
    """The same of any thread, by its folder in /proc. Raises OSError, ValueError, IndexError."""
    number, *call = (task / "syscall").read_text().split()
    if int(number) != FUTEX:
        return False
    return bool(int(call[1], 16) & _PRIVATE) and int(call[3], 16) == _NO_LIMIT


def _callers(native_id: int) -> list[str]:
    """The libraries of the innermost waiting functions; empty if not known.

    Values left on the stack by earlier calls may look like return addresses, so several are read.
    The system call itself is in libc, and so is the first address.
    """
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        call = Path(f"/proc/self/task/{native_id}/syscall").read_text().split()
        if not call[0].isdecimal() or int(call[0]) != FUTEX:  # the word "running" is not a number
            return []
        code = _code()
        found = [name for address in _words(int(call[-2], 16)) if (name := _name(address, *code))]
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
