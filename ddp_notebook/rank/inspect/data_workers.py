"""The workers of the DataLoader in which the main thread waits for a batch: do they make progress?

Reading /proc costs a worker nothing. A worker that sleeps or reads from a slow disk has no CPU time
either, and delivers all the same; so one counts as stuck only if all its threads are in the system
call that waits for a lock of their own process, without a time limit. Only such a worker is sent a
signal, to which Python's faulthandler responds with its stack.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import platform
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from ddp_notebook import model
from ddp_notebook.launch.process_groups import stat_fields
from ddp_notebook.model import Place
from ddp_notebook.rank import torch_private
from ddp_notebook.rank.component import Component
from ddp_notebook.rank.inspect.frames import UserCode, file_shown
from ddp_notebook.rank.rank_process import RankProcess
from ddp_notebook.rank.torch_private import Loading

_FUTEX_OF = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_FUTEX = _FUTEX_OF.get(platform.machine(), -1)
"""The number of the system call in which a thread waits for a lock; -1 if not known."""
_ACCEPT_OF = {"x86_64": (43, 288), "aarch64": (202, 242), "riscv64": (202, 242)}
_ACCEPT = _ACCEPT_OF.get(platform.machine(), ())
"""The numbers of the system calls in which a thread waits for incoming connections."""
_LINE = re.compile(r'^ +File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7


class DataWorkers(Component):
    """Since when each worker has not run, and where; kept between reports."""

    def __init__(self, process: RankProcess, user_code: UserCode) -> None:
        self._folder = process.folder
        self._is_users = user_code.is_users
        self._stacks = -1
        """The file to which forked children write their stacks; -1 if they cannot."""
        self._batch: object = None
        self._ran: dict[int, tuple[int, float]] = {}
        """By pid, for how long (ns) its threads have run, and since when (s) that is so."""
        self._places: dict[int, Place | None] = {}

    def attach(self) -> None:
        """Let processes forked from this one write their stack on a signal."""
        if not _FUTEX > 0 or not hasattr(faulthandler, "register"):
            return
        # Workers inherit the handler and the file by fork. The file loses its name at once, so that
        # nothing is left of it when the rank is killed.
        path = self._folder / f"stacks-{os.getpid()}"
        self._stacks = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        path.unlink()
        faulthandler.register(_SIGNAL, file=self._stacks, all_threads=True, chain=False)

    def owing(self, frames: Iterable[FrameType]) -> tuple[model.Worker, ...]:
        """Return the workers that must deliver the batch for which these frames wait."""
        loading = torch_private.loading(frames, awaited=True)
        if loading is None or not loading.due:
            return ()
        # A worker that has delivered is at work on a later batch: the clock begins anew.
        if loading.batch != self._batch:
            self._batch = loading.batch
            self._ran.clear()
            self._places.clear()
        return tuple(self._worker(loading, pid) for pid in loading.owing)

    def _worker(self, loading: Loading, pid: int) -> model.Worker:
        ran, now_s = _ran_ns(pid), time.monotonic()
        before, since_s = self._ran.get(pid, (-1, now_s))
        if ran != before or ran < 0:
            since_s = now_s
        self._ran[pid] = ran, since_s
        still_s = now_s - since_s
        locked = still_s > 0 and _waits_for_ever(pid)
        caught = 0  # a process that does not catch the signal would be ended by it
        with contextlib.suppress(OSError, ValueError, IndexError):
            status = Path(f"/proc/{pid}/status").read_text()
            caught = int(status.split("SigCgt:")[1].split()[0], 16)
        forked = self._stacks >= 0 and bool(caught >> (_SIGNAL - 1) & 1)
        if locked and forked and pid not in self._places and still_s > 1.0:
            self._places[pid] = self._place_of(pid)
            # It ran to answer, and would seem to have gone on.
            self._ran[pid] = _ran_ns(pid), since_s
        return model.Worker(
            pid,
            due=pid == loading.due,
            forked=forked,
            still_s=round(still_s, 1),
            locked=locked,
            stopped=next(iter(_stat(pid)), "") in ("T", "t"),
            place=self._places.get(pid),
        )

    def _place_of(self, pid: int) -> Place | None:
        """Return where a forked worker is: the user's innermost line, else the innermost of any."""
        os.ftruncate(self._stacks, 0)
        try:
            os.kill(pid, _SIGNAL)
        except OSError:
            return None
        deadline_s, data = time.monotonic() + 0.2, b""
        while time.monotonic() < deadline_s:
            time.sleep(0.005)
            before, data = data, os.pread(self._stacks, 1 << 16, 0)
            if data and data == before:  # it is complete
                break
        threads = re.split(
            r"^(?:Current t|T)hread .*$", data.decode("utf-8", "replace"), flags=re.MULTILINE
        )
        loop = next((thread for thread in threads if "_worker_loop" in thread), "")
        lines = _LINE.findall(loop)
        users = (line for line in lines if self._is_users(line[0]))
        shown = next(users, next(iter(lines), None))
        if shown is None:
            return None
        path, line, function = shown[0], int(shown[1]), shown[2]
        file = file_shown(path).rpartition("/")[2]
        text = linecache.getline(path, line).strip()[:200]
        return Place(file, line, "" if function == "<module>" else function, text)


def end(frames: Iterable[FrameType]) -> None:
    """End the workers of the DataLoader that these frames are in.

    An aborted rank would otherwise wait several seconds for each worker without progress.
    """
    loading = torch_private.loading(frames)
    for pid in loading.everyone if loading is not None else ():
        if _stat(pid)[1:2] == [str(os.getpid())]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)  # one that is stopped ends only then


# -- /proc ----------------------------------------------------------------------------


def _ran_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process; -1 if not known."""
    total = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return -1
    return total


def _waits_for_ever(pid: int) -> bool:
    """Return whether all threads of a process wait for locks that only they can release.

    Threads that wait for connections are ignored: multiprocessing has one, to share files.
    """
    locked = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            number, *arguments = (task / "syscall").read_text().split()
            if int(number) in _ACCEPT:
                continue
            # futex(address, operation, value, timeout): a lock of multiprocessing's is shared, and
            # another process may release it; with a timeout the wait ends by itself.
            # The flag of a lock that only threads of the same process can release.
            of_process = int(number) == _FUTEX and int(arguments[1], 16) & 128
            if not of_process or int(arguments[3], 16):  # a time limit
                return False
            locked += 1
    except (OSError, ValueError, IndexError):  # it ended, runs just now, or may not be read
        return False
    return locked > 0


def _stat(pid: int) -> list[str]:
    """Return the state of a process, its parent, and more; nothing of one that is gone."""
    with contextlib.suppress(OSError):
        return stat_fields(Path(f"/proc/{pid}/stat"))
    return []
