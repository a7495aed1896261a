"""The first call in a rank's process, before ipyparallel's engine starts: the beacon is lit."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ddp_notebook.agent import beacon
from ddp_notebook.model import Stage, StageFinished

_log = Path(os.devnull)
_spool = Path(os.curdir)


def start(rank: int, url: str, key: str, log: str, spool: str) -> None:
    """Light the beacon and say that the rank was launched.

    `log` is the file behind this process's own stdout and stderr, `spool` the folder for
    output that is too long to send.
    """
    global _log, _spool
    _log, _spool = Path(log), Path(spool)
    beacon.start(rank, url, key)
    beacon.current().emit(
        StageFinished, stage=Stage.LAUNCHED, pid=os.getpid(), host=socket.gethostname()
    )


def log_file() -> Path:
    """The file behind this process's own stdout and stderr."""
    return _log


def spool_folder() -> Path:
    """Where output goes that is too long to send."""
    return _spool
