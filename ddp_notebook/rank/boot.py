"""The first call in a rank's process, before ipyparallel's engine starts: the beacon is lit."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from pathlib import Path

from ddp_notebook.model import Stage, StageFinished
from ddp_notebook.rank import events, state

TURN_S = 0.0005
"""How long a thread that computes keeps Python's lock from others that want it (5 ms by default).

Each file that an answer reads gives the lock away: with some hundred of them a rank whose main
thread computes would answer after seconds, or fall behind for good. Where no other thread wants the
lock it changes nothing.
"""
_log = Path(os.devnull)
_spool = Path(os.curdir)
_loaded: frozenset[str] = frozenset()


def start(rank: int, url: str, key: str, log: str, spool: str) -> None:
    """Light the beacon and say that the rank was launched.

    `log` is the file behind this process's own stdout and stderr, `spool` the folder for
    output that is too long to send.
    """
    global _log, _spool, _loaded
    _log, _spool = Path(log), Path(spool)
    sys.setswitchinterval(min(sys.getswitchinterval(), TURN_S))
    keep_temporary_files_in(_spool.parent)
    _loaded = frozenset(name.partition(".")[0] for name in sys.modules)
    state.current.rank = rank
    events.start(rank, url, key)
    events.current().emit(
        StageFinished, stage=Stage.LAUNCHED, pid=os.getpid(), host=socket.gethostname()
    )


def keep_temporary_files_in(folder: Path) -> None:
    """Have multiprocessing put its sockets and folders there: a killed rank cannot remove them.

    Uses `_config["tempdir"]` and `_config["semprefix"]`, where multiprocessing itself keeps
    the place and the names of its semaphores; without them, they are
    in the system's temporary folder as ever. The user's own temporary files stay
    where they are: they may be worth keeping.
    """
    config = getattr(multiprocessing.current_process(), "_config", None)
    if isinstance(config, dict):
        own = folder / f"mp-{os.getpid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        config["tempdir"] = str(own)
        # As `launch.shared_memory` knows them: a semaphore of a killed rank is removed by name.
        config["semprefix"] = f"/mp-{folder.name}"


def log_file() -> Path:
    """The file behind this process's own stdout and stderr."""
    return _log


def spool_folder() -> Path:
    """Where output goes that is too long to send."""
    return _spool


def loaded_at_start() -> frozenset[str]:
    """Names of the top-level modules that were there before any code of the user's."""
    return _loaded
