"""Processes killed, ended or stopped at random moments: every call answers, and the next works.

Not run by pytest: `python tests/random_kills.py ROUNDS`. `DDP_NOTEBOOK_SEED` repeats a failure.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import warm_fork_server

from ddp_notebook.errors import DDPError
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.testing import pids_of

TWO = InitOptions(world_size=2, device="cpu")
SEED = int(os.environ.get("DDP_NOTEBOOK_SEED", random.SystemRandom().randrange(1 << 30)))
ANSWERS_WITHIN_S = 8.0
"""On a quiet machine: 2 s of them a process is stopped, and what ends it may wait for it."""
STOPPED_S = 2.0
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
TARGETS = ("fork_server", "controller", "store", "rank")
TRAIN = "for _ in range(200):\n    dist.all_reduce(torch.ones(1))"


def doings(session: Session, script: Path) -> dict[str, Callable[[], Any]]:
    """What a user may be doing, by name."""
    return {
        "cell": lambda: session.run_cell(TRAIN),
        "hang": lambda: session.run_cell("if rank == 0:\n    dist.all_reduce(torch.ones(1))"),
        "script": lambda: session.run_script(str(script)),
        "why": session.why,
        "where": session.where,
        "abort": session.abort,
        "restart": lambda: session.restart((1,)),
        "set up": lambda: session.set_up(TWO),
        "shutdown": lambda: session.shutdown(keep_warm=True),
        "init": lambda: session.init(TWO, replace=True),
    }


def in_time(what: str, do: Callable[[], Any]) -> str:
    """What `do` raised for the user, empty for nothing. Fails where it is late, or raw."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001  # judged below
            raised.append(error)

    began_s = time.monotonic()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(scaled_for_load(ANSWERS_WITHIN_S))
    assert not thread.is_alive(), f"{what} has not answered for {time.monotonic() - began_s:.1f} s"
    for error in raised:
        trace = "".join(traceback.format_exception(error)[-6:])
        assert isinstance(error, DDPError), f"{what}: {trace}"
    return str(raised[0]) if raised else ""


def strike(pid: int, number: int) -> None:
    """Signal a process that we started; one that was stopped goes on after a while."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            again = threading.Timer(STOPPED_S, _go_on, (pid,))
            again.daemon = True
            again.start()


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def one_round(session: Session, choose: random.Random, script: Path) -> None:
    doing, target = choose.choice(list(doings(session, script))), choose.choice(TARGETS)
    number, delay_s = choose.choice(SIGNALS), choose.random() * 0.3
    what = f"{number.name} of {target} {delay_s:.2f} s into {doing}"
    session.run_cell("kept = rank + 100").raise_for_error()
    pids = pids_of(session)
    pid = choose.choice(pids["ranks"]) if target == "rank" else pids[target]
    blow = threading.Timer(delay_s, strike, (pid, number))
    blow.start()
    said = in_time(what, doings(session, script)[doing])
    blow.join()
    if target == "rank" and doing in ("cell", "why", "where") and number == signal.SIGKILL:
        other = 1 - pids["ranks"].index(pid)
        in_time(f"restart after {what}", lambda: session.restart((1 - other,)))
        kept = session.run_cell("assert kept == rank + 100", ranks=(other,))
        assert kept.error is None, f"{what}: {kept.error}"
    if session.running and not in_time(f"restart after {what}", session.restart):
        pass
    else:
        in_time(f"shutdown after {what}", session.shutdown)
        failed = in_time(f"init after {what} ({said})", lambda: session.init(TWO))
        assert not failed, f"the next init after {what}: {failed}"
    assert session.run_cell("rank").error is None, f"no cell works after {what}"


def main(rounds: int) -> int:
    """Play `rounds`; the exit status."""
    choose = random.Random(SEED)
    session = Session()
    with warm_fork_server(), tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(
            "import torch, torch.distributed as dist\n"
            f"dist.init_process_group('gloo')\n{TRAIN}\ndist.destroy_process_group()\n"
        )
        try:
            session.init(TWO)
            for number in range(rounds):
                try:
                    one_round(session, choose, script)
                except AssertionError as error:
                    print(f"DDP_NOTEBOOK_SEED={SEED}, round {number}: {error}")
                    return 1
        finally:
            session.shutdown()
    print(f"{rounds} rounds, seed {SEED}: every call answered, and the next one worked")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
