"""The checks before ranks are started, and the causes to name when a start has failed.

The checks: whether they fit (memory, cores, GPUs, this user's limits of processes, open files and
room on disk), whether this package has changed under the kernel or others are too old, and whether
a file beside the notebook has the name of a module that ranks load.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook import files
from ddp_notebook.errors import DDPError, UsageMistake
from ddp_notebook.launch import out_of_memory
from ddp_notebook.launch.host_facts import cores
from ddp_notebook.launch.session_folder import files_left, parents
from ddp_notebook.model import counted, format_bytes

if TYPE_CHECKING:
    from ddp_notebook.session.options import InitOptions

PROC = Path("/proc")
RANK_BYTES = 300 * 2**20
"""The memory that a rank needs: for Python, torch, an engine, and room for a small model."""
_LEAST_RANK_BYTES = 60 * 2**20
"""No rank was measured to take less, forked and without a model."""
LEAST_FILES = 100
"""The files of a session: folders, logs, sockets and records; with many ranks it has more."""
_TASKS_OF_A_RANK = 16
"""Threads and processes."""


# -- before ranks are started -----------------------------------------------------------------


def check_start(world_size: int, *, far: bool = False) -> None:
    """Raise UsageMistake where a new session of so many ranks cannot be started.

    `far`: they are on other hosts, and take sockets here and nothing else.
    """
    why = why_too_low_for_files(world_size, open_files())
    why = why or why_too_few_processes(0 if far else world_size)
    if not (why or far):
        why = why_too_little_memory(world_size, out_of_memory.bytes_left())
    if why:
        raise UsageMistake(why)


def check_processes(verb: str, *, ranks: int = 0, in_script: int = 0) -> None:
    """Raise UsageMistake where what `verb` starts would meet this user's limit of processes.

    `ranks` have no process now, nor have those of a script.
    """
    needed = ranks * _TASKS_OF_A_RANK + in_script * 8
    if why := _why_no_more_tasks(f"{verb} needs", needed + _TASKS_OF_A_CHANGE):
        raise UsageMistake(f"{why} Nothing was changed.")


_TASKS_OF_A_CHANGE = 8
"""Threads and processes that come and go while others are started in a session that runs."""


def has_room_for_threads() -> bool:
    """Return whether a live board may start threads: at the limit the notebook's process ends."""
    return not _why_no_more_tasks("", _TASKS_OF_A_CHANGE)


def warning(options: InitOptions) -> str:
    """Return what is to be said before crowded ranks are started; empty for nothing."""
    if options.hosts:  # whether it is too much for them is known when they are there
        return ""
    world_size, why, fits = options.world_size, [], [options.world_size]
    most = 8 * cores()  # with more, a rank waits so long for its turn that setup itself is slow
    if world_size > most:
        fits.append(most)
        why.append(
            f"{world_size} ranks take turns on {counted(cores(), 'CPU core')}: starting them "
            "takes long, and so does each cell."
        )
    left_bytes = out_of_memory.bytes_left()
    if left_bytes is not None and left_bytes < world_size * RANK_BYTES:
        fits.append(max(1, left_bytes // RANK_BYTES))
        why.append(
            f"{format_bytes(left_bytes)} of memory are left, and a rank with a small model takes "
            f"about {format_bytes(RANK_BYTES)}. Where memory runs out, the system kills ranks."
        )
    if not why:
        return ""
    why.append("If that is not what you want, interrupt the start (Ctrl-C; in a notebook I, I).")
    return "\n".join([*why, f"What fits: %ddp_init --world-size {min(fits)}"])


def why_too_little_memory(
    world_size: int, left_bytes: int | None, command: str = "%ddp_init --world-size "
) -> str:
    """Return why this many ranks cannot start; empty if they can, or if it is unknown.

    `command` is to be typed, with a number that fits behind it. What the system does at the limit
    is to kill processes: the notebook's, too.
    """
    if left_bytes is None or left_bytes >= world_size * _LEAST_RANK_BYTES:
        return ""
    return (
        f"{counted(world_size, 'rank')} {'does' if world_size == 1 else 'do'} not fit into memory: "
        f"{format_bytes(left_bytes)} are left, and each "
        f"takes {format_bytes(_LEAST_RANK_BYTES)} at least, without a model. Free memory "
        "(%ddp_shutdown in other notebooks), or type: "
        f"{command}{max(1, left_bytes // RANK_BYTES)}"
    )


def why_too_few_processes(world_size: int) -> str:
    """Return why a session of so many ranks cannot start; empty if it can."""
    who = "1 rank needs" if world_size == 1 else f"{world_size} ranks need"
    # 32: beside those of the ranks, with a board
    return _why_no_more_tasks(who, 32 + world_size * _TASKS_OF_A_RANK)


def _why_no_more_tasks(what: str, needed: int) -> str:
    """Return why `needed` more cannot start; empty if they can.

    At the limit a thread that cannot be started ends its process: the notebook's, too.
    """
    if sys.platform != "linux":
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    user = _status(PROC / "self").get("Uid", "").split()[:1]
    # The limit does not bind root. So many are no limit, and counting is not free.
    if limit == resource.RLIM_INFINITY or limit > 1 << 14 or user in ([], ["0"]):
        return ""
    every = (_status(path) for path in PROC.glob("[0-9]*"))
    used = sum(int(s["Threads"]) for s in every if s.get("Uid", "").split()[:1] == user)
    if limit - used >= needed:
        return ""
    return (
        f"This user may have {limit} processes and threads (ulimit -u), and has {used}: "
        f"{what} about {needed} more. End others, or start Jupyter with a higher limit."
    )


def _status(process: Path) -> dict[str, str]:
    """Return the fields of proc(5)'s status by name; none for a process that has ended."""
    try:
        text = (process / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {name: rest.strip() for name, _, rest in (s.partition(":") for s in text.splitlines())}


def open_files() -> int:
    """Return how many files and sockets this process has open; 0 where that is not told."""
    try:
        return len(list(Path("/dev/fd").iterdir()))
    except OSError:
        return 0


def files_needed(world_size: int, own: int) -> int:
    """Return the open files of the process with most, as measured, and some.

    It is the controller or, with its `own` files, this one: in a hang, a script or a restart.
    """
    return max(80 + 7 * world_size, own + 60 + 9 * world_size)


def why_too_low_for_files(world_size: int, own: int) -> str:
    """Return why so many ranks cannot start; empty where the limit of open files allows it.

    At the limit the controller is killed by an error in C code that says nothing. `own` are the
    files that the notebook has open without ranks.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(world_size, own)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return ""
    what = f"A process may have {limit} files and sockets open here (ulimit -n), and "
    what += f"{counted(world_size, 'rank')} need{'s' * (world_size == 1)} {needed}. "
    if most != resource.RLIM_INFINITY and most < needed:
        return f"{what}Ask the administrator to raise the hard limit (nofile in limits.conf)."
    return (
        f"{what}In the shell that starts Jupyter: ulimit -n {needed}. Or restart the kernel, and "
        "before %load_ext: import resource; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))"
    )


# -- when a start has failed ------------------------------------------------------------------


def why_not_started(error: Exception | KeyboardInterrupt) -> str:
    """Return what went wrong in a start that left no rank, and how to retry."""
    what = str(error)
    if isinstance(error, KeyboardInterrupt):
        what = "Setup was interrupted."
    elif getattr(error, "errno", None) == errno.EMFILE:
        what = why_no_more_files()
    elif not isinstance(error, DDPError):
        what = f"The ranks could not be started: {type(error).__name__}: {error}."
    for why in filter(None, (why_not_loaded(sys.path), why_no_room())):
        what = f"{what}\n{why}"
    return f"{what}\nNothing is left running. Try again with %ddp_init."


def why_no_more_files() -> str:
    """Return what an error says that this process has too many files open, and what to type."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"The notebook may have {limit} files and sockets open (ulimit -n), and ranks need "
        f"more. In a cell: import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, "
        f"{most}))"
    )


def why_no_room() -> str:
    """Return why nothing could be started; empty where there is room for a session's files.

    What cannot write them ends without a word.
    """
    folder = parents()[0]
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and most < 1 << 12:  # with no less, ranks ran cells
        return (
            f"No file may grow beyond {format_bytes(most)} here (ulimit -f), and those of a "
            "session do. In the shell that starts Jupyter: ulimit -f unlimited"
        )
    try:
        left_bytes, more_files = shutil.disk_usage(folder).free, files_left(folder)
    except OSError:  # it is gone, which the error itself says
        return ""
    left = format_bytes(left_bytes)
    if more_files is not None and more_files < LEAST_FILES:
        left = counted(more_files, "more file")
    elif left_bytes >= 1 << 16:
        return ""
    return (
        f"No room is left in {folder} ({left}), and a session needs files "
        "there. Delete what is not needed, or restart the kernel with TMPDIR set to another folder."
    )


_NEEDED = frozenset(
    {
        *("torch", "numpy", "zmq", "psutil", "tornado", "traitlets", "dateutil", "decorator"),
        *("IPython", "ipykernel", "ipyparallel", "jupyter_client", "jupyter_core", "comm"),
        *("packaging", "sympy", "networkx", "jinja2", "fsspec", "filelock", "typing_extensions"),
    }
)


def why_not_loaded(python_path: Sequence[str]) -> str:
    """Return which files shadow modules that ranks load, and the remedy; empty for none.

    Asked when a start has failed: many such files are harmless.
    """
    shadowing: list[str] = []
    own = Path(os.__file__).parent  # what comes before it in the path wins over Python's own
    names = sys.stdlib_module_names | _NEEDED
    for entry in python_path:
        folder = Path(entry)
        if not folder.is_absolute() and files.current_folder_is_gone():
            continue
        if folder.name in ("site-packages", "dist-packages"):
            break
        if folder.resolve() == own:
            names = _NEEDED
            continue
        candidates = ((folder / f"{name}.py").absolute() for name in sorted(names))
        shadowing += [str(file) for file in candidates if file.is_file()]
    if not shadowing:
        return ""
    what, them = "have the names of modules", "them"
    if len(shadowing) == 1:
        what, them = "has the name of a module", "it"
    return (
        f"{' and '.join(shadowing[:3])} {what} that the ranks load, and Python finds {them} "
        f"first. Rename {them}."
    )


# -- the package itself, and those that it needs ----------------------------------------------

OLDEST = {"python": "3.11", "torch": "2.8", "ipyparallel": "9.0", "ipykernel": "6.29"}
"""The oldest versions that are supported. An older torch cannot give its store a listening socket,
so that no rank would get further than the store."""


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``2.6.0+cpu`` is 2, 6, 0."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def check_versions() -> None:
    """Raise UsageMistake where a package is too old for ranks to start."""
    for name, oldest in OLDEST.items():
        with contextlib.suppress(
            metadata.PackageNotFoundError
        ):  # Python itself; a package without metadata
            if release(version := metadata.version(name)) < release(oldest):
                raise UsageMistake(
                    f"{name} {version} is older than {oldest}, the oldest with which ranks start: "
                    f'type {sys.executable} -m pip install "{name}>={oldest}" in a shell, and '
                    "restart the kernel."
                )


def _installed_version() -> str:
    """Return the version that a new process would load; empty where that is not known."""
    try:
        source = (_PACKAGE / "__init__.py").read_text("utf-8", "replace")
    except OSError:  # it lies in an archive; it is being replaced
        return ""
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return found[1] if found else ""


_PACKAGE = Path(__file__).parents[1]
loaded_version = _installed_version()
"""The version of this package that this process runs; empty where that is not known."""


def check_package() -> None:
    """Raise UsageMistake after an upgrade: ranks would run the new code, and the kernel the old.

    The two would not understand each other's messages.
    """
    installed = _installed_version()
    if installed and installed != loaded_version:
        raise UsageMistake(
            f"ddp_notebook {installed} was installed after this kernel had loaded "
            f"{loaded_version}, and the two do not work together. Restart the kernel, then type "
            "%load_ext ddp_notebook"
        )
