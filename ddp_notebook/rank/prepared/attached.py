"""The runtime in a prepared rank, from its first `init_process_group` on.

It observes and answers. It refuses no collective: what does not match goes to torch as without us.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from pathlib import Path

from ddp_notebook.model import codec
from ddp_notebook.rank import calls
from ddp_notebook.rank.component import Run
from ddp_notebook.rank.core import RankCore
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.rank.prepared.ending import write_when_stuck
from ddp_notebook.rank.rank_process import NoEvents, RankProcess

RUN = 1
"""The number of the run: a prepared process has one."""
FACTS = "facts.json"
_READING = (calls.REPORT, calls.STACK, calls.VARIABLES, calls.RUN_FACTS, calls.SOFTWARE)
"""What may be asked: whoever asks cannot change what the job does."""


def attach(rank: int, folder: Path) -> None:
    """Observe this process as `rank` and answer at the socket in `folder`."""
    core = RankCore(RankProcess(rank, NoEvents(), folder, folder / "ask", guards=False))
    core.handlers.answer_only(_READING)
    life = core.lifecycle()
    life.attach()
    life.run_begins(Run(RUN))
    pid = os.getpid()

    def ends() -> None:
        """What the training came to, for later: nothing runs any more."""
        if os.getpid() == pid:
            with contextlib.suppress(Exception):
                core.observer.settle()
                facts = codec.encode(core.summary.facts())
                job_folder.write(folder / FACTS, {"facts": facts})

    atexit.register(ends)

    def counts() -> tuple[int, int]:
        log = core.observer.log
        return (log.written if log is not None else -1), core.init_calls.calls.returned

    write_when_stuck(counts, lambda: codec.encode(core.reporter.report()), folder / "report.json")
