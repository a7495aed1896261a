"""The system's facts about this process: its network, whether its main thread is runnable."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import threading
import time
from pathlib import Path

import torch

from ddp_notebook.launch.process_groups import stat_fields


def versions() -> dict[str, str]:
    """Facts that must be the same on all ranks."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["ddp_notebook"] = importlib.metadata.version("ddp_notebook")
    return versions


def network() -> str:
    """This process's network; the same text in all processes that share a loopback interface.

    The fault lab may have moved it. Empty if not known.
    """
    with contextlib.suppress(OSError):
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted} {os.readlink('/proc/thread-self/ns/net')}"  # noqa: PTH115
    return ""


def is_runnable() -> bool:
    """True if the main thread, or one that Python does not know (one of torch's), is runnable.

    A thread that polls, or serves a connection to the store, is runnable only for a moment; one
    that computes, or waits for a core, is so in every sample. NCCL's own threads are left out: the
    one that carries data over sockets yields in a loop, also while nothing comes.
    """
    main = threading.main_thread().native_id
    ours = {str(thread.native_id) for thread in threading.enumerate()} - {str(main)}
    # One look proves nothing: a thread that wakes up for a moment is runnable in it, too. A thread
    # that computes is in state R at each look, with or without a core.
    wanting: set[str] | None = None
    for look in range(4):
        if look:
            time.sleep(0.004)
        now = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError, IndexError):
                # NCCL's have such names with NCCL_SET_THREAD_NAME=1, which a rank is started with;
                # torch's own always do.
                nccls = ("NCCL", "pt_nccl")
                runs = task.name not in ours and stat_fields(task / "stat")[0] == "R"
                if runs and not (task / "comm").read_text().startswith(nccls):
                    now.add(task.name)
        wanting = now if wanting is None else wanting & now
        if not wanting:
            return False
    return True


def main_cpu_s() -> float:
    """Return the CPU time of the main thread: the same as before while it is blocked."""
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))
