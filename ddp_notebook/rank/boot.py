"""The first call in a rank's process: reports that it was launched, before the engine starts.

Imports no torch: where a process is not forked, loading it takes seconds, and the session would
not know meanwhile that the process lives.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from ddp_notebook.launch.process_ids import own_process_id
from ddp_notebook.launch.session_folder import semaphore_prefix
from ddp_notebook.model import Stage, StageFinished
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.rank_process import RankProcess, multiprocessing_folder, questions_of

SWITCH_INTERVAL_S = 0.0005
"""How long a computing thread keeps the GIL while others wait for it (5 ms by default).

Each file that an answer reads releases the lock: with some hundred of them a rank whose main
thread computes would answer after seconds, or never catch up. Where no other thread wants the
lock it changes nothing.
"""


@dataclass(frozen=True)
class EngineProcess:
    """The launch parameters of a rank's process that becomes an engine."""

    process: RankProcess
    events: EventSender
    log: Path
    """The file behind the process's own stdout and stderr."""


_engine: EngineProcess | None = None


def start(rank: int, events: str, source: str, log: str, output_folder: str) -> None:
    """Start the event sender and say that the rank was launched; `events` is where they go.

    `log` is the file behind this process's own stdout and stderr, `output_folder` the folder for
    output that is too long to send.
    """
    global _engine
    folder = Path(output_folder)
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
    keep_temporary_files_in(folder.parent, folder.parent)
    sender = EventSender(rank, events, source)
    process = RankProcess(rank, sender, folder, questions_of(folder.parent, rank))
    _engine = EngineProcess(process, sender, Path(log))
    sender.emit(
        StageFinished, stage=Stage.LAUNCHED, pid=own_process_id(), host=socket.gethostname()
    )


def engine() -> EngineProcess:
    """The launch parameters of this process. Raises RuntimeError if it is not a rank."""
    if _engine is None:
        raise RuntimeError("this process is not a rank of a ddp_notebook session")
    return _engine


def keep_temporary_files_in(folder: Path, session: Path) -> None:
    """Have multiprocessing put its sockets and folders there: a killed rank cannot remove them.

    Uses `_config["tempdir"]` and `_config["semprefix"]`, where multiprocessing itself keeps
    the folder and the names of its semaphores; without them, they are in the system's
    temporary folder as ever. The user's own temporary files stay where they are: they may be
    worth keeping.
    """
    config = getattr(multiprocessing.current_process(), "_config", None)
    if isinstance(config, dict):
        own = multiprocessing_folder(folder, os.getpid())
        # multiprocessing's sockets have to fit behind it: a socket's path has about a hundred
        # bytes.
        if len(os.fsencode(own)) <= 70:
            own.mkdir(mode=0o700, exist_ok=True)
            config["tempdir"] = str(own)
        # By the name of the `session` folder a semaphore of a killed rank is known, and removed.
        config["semprefix"] = semaphore_prefix(str(session))
