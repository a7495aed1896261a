"""Processes killed, ended or stopped at random moments: every cell answers, and the next works.

`python tests/random_kills.py ROUNDS` plays many in a real kernel and tells how long answers took;
tests/contract/test_random_kills.py plays a few. `DDP_NOTEBOOK_SEED` makes other choices.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import random_rounds
import support
from kernels import Reply
from random_rounds import OURS, SESSION
from support import Pids, is_alive

from ddp_notebook.launch.timeouts import scaled_for_load

ANSWERS_WITHIN_S = 5.0
"""On a quiet machine, from the blow to the end of the cell."""
GIVEN_UP_AFTER_S = 60.0
LATEST_BLOW_S = 0.4
STOPPED_S = 2.0
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
TARGETS = ("kernel", "fork server", "controller", "store", "rank", "newest")
TRAIN = "for _ in range(300):\n    dist.all_reduce(torch.ones(1))"
PAUSE = "for step in range(3):\n    breakpoint()\n    dist.all_reduce(torch.ones(1))"
DOINGS = {
    "load": "%reload_ext ddp_notebook",
    "init": "%ddp_init --world-size 2",
    "step": "%ddp_step",
    "cell": f"%%ddp\n{TRAIN}",
    "hang": "%%ddp\nif rank == 0:\n    dist.all_reduce(torch.ones(1))",
    "script": "%ddp_run {script}",
    "bench": "%ddp_bench --max 4K --budget 1s",
    "why": "%ddp_why",
    "abort": "%ddp_abort",
    "restart": "%ddp_restart",
    "restart one": "%ddp_restart --ranks 1",
    "shutdown": "%ddp_shutdown",
    "more ranks": "%ddp_init --world-size 3 --replace",
    "detach": "%ddp_run --detach {script}",
    "wait": "%ddp_wait",
    "fault": "%ddp_fault wrong-port",
    "repair": "%ddp_fault --repair",
    "pause": f"%%ddp\n{PAUSE}",
    "pause in a script": "%ddp_run {paused}",
    "step lines": "%ddp_step",
    "step to the end": "%ddp_step --to end",
    "look at a line": "%ddp_print kept + 1",
    "abort at a line": "%ddp_abort",
    "shutdown at a line": "%ddp_shutdown",
}
"""What a user may be doing, by name."""
PAUSED = f"%%ddp\n{PAUSE}"
BEFORE = {
    "load": ("%unload_ext ddp_notebook",),
    "init": ("%ddp_shutdown",),
    "step": ("%ddp_shutdown\n%ddp_init --world-size 2 --step",),
    "wait": ("%ddp_run --detach {script}",),
    "repair": ("%ddp_fault wrong-port",),
    "step lines": (PAUSED,),
    "step to the end": (PAUSED,),
    "look at a line": (PAUSED,),
    "abort at a line": (PAUSED,),
    "shutdown at a line": (PAUSED,),
}
"""What has to be done first, so that there is something to do."""
NEXT = ("%ddp_restart", "%ddp_restart --ranks 1", "%ddp_shutdown", "%ddp_why")
NOBODY = Pids(0, 0, 0, (), "")
RUNNING = f"{SESSION}.running and not {SESSION}.pool.lost_reason"
SCRIPT = """import torch, torch.distributed as dist
dist.init_process_group("gloo")
kept = 1
{train}
dist.destroy_process_group()
"""


@dataclass
class Blow:
    """A signal to a process, after a while. One that is stopped goes on later, or with the round.

    `among` are the processes that may be struck; none when they are only to be started.
    """

    target: str
    number: signal.Signals
    delay_s: float
    for_good: bool
    among: Sequence[int]
    kernel: int
    struck: int = 0
    struck_s: float = 0.0
    """When, by time.monotonic()."""

    def __str__(self) -> str:
        lasting = f" for {'good' if self.for_good else '2 s'}" * (self.number == signal.SIGSTOP)
        return f"{self.number.name}{lasting} of {self.target} {self.delay_s:.2f} s into"

    def timers(self) -> list[threading.Timer]:
        """What strikes, and lets go."""
        timers = [threading.Timer(self.delay_s, self.strike)]
        if self.number == signal.SIGSTOP and not self.for_good:
            timers.append(threading.Timer(self.delay_s + STOPPED_S, self.let_go))
        return timers

    def strike(self) -> None:
        """Signal the process, if there is one."""
        self.struck = self.kernel if self.target == "kernel" else self._chosen()
        self.struck_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            if self.struck:
                os.kill(self.struck, self.number)

    def await_end(self) -> None:
        """What was to end has ended: what is typed next finds it so."""
        if self.number != signal.SIGSTOP and self.struck:
            support.eventually(lambda: not is_alive(self.struck), what=f"the end by {self}")

    def _chosen(self) -> int:
        new = (p.pid for p in support.our_processes() if p.pid != self.kernel)
        among = [pid for pid in self.among if is_alive(pid)] or sorted(new)
        return (among[0] if self.target == "fork server" else among[-1]) if among else 0

    def let_go(self) -> None:
        """Whoever was stopped goes on."""
        if self.number == signal.SIGSTOP and self.struck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.struck, signal.SIGCONT)


class Kills(random_rounds.Rounds):
    """Rounds in which a process is struck, with what each answer took."""

    def __init__(self, script: Path) -> None:
        super().__init__(script)
        script.write_text(SCRIPT.format(train=TRAIN))
        self.paused = script.with_name("paused.py")
        self.paused.write_text(SCRIPT.format(train=PAUSE))
        self.took: list[tuple[float, float, str]] = []
        """How many seconds an answer took, the tasks per core then, and to what."""

    def summary(self) -> None:
        """Print the answers that took longest."""
        for took_s, load, what in sorted(self.took, reverse=True)[:10]:
            print(f"{took_s:.1f} s at {load:.1f} tasks a core: {what}")

    def answer(self, what: str, code: str, blow: Blow | None = None) -> Reply:
        """How a cell ended. Fails where it is late, or raises what is not for a user to read."""
        began_s = time.monotonic()
        message = self.kernel.send(code)
        timers = blow.timers() if blow is not None else []
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            reply = self.kernel.finish(message, GIVEN_UP_AFTER_S)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from None
        if blow is not None:
            timers[0].join()
            blow.await_end()
        took_s = reply.ended_at - max(began_s, blow.struck_s if blow is not None else 0.0)
        self.took.append((took_s, os.getloadavg()[0] / (os.cpu_count() or 1), what))
        text = f"{what} ended after {took_s:.1f} s, {reply.ename}: {reply.evalue}\n{reply.text}"
        assert took_s < scaled_for_load(ANSWERS_WITHIN_S), f"late: {text}"
        raw = reply.ename not in OURS or "Exception in thread" in reply.text
        assert not raw, f"raw: {text}"
        assert "another program removed" not in text, f"untrue: {text}"
        return reply

    def play(self) -> str:
        """One round; what was done in it."""
        doing = self.choose.choice(list(DOINGS))
        target, number = self.choose.choice(TARGETS), self.choose.choice(SIGNALS)
        for_good = self.choose.random() < 0.5 and target != "kernel"
        delay_s = self.choose.random() * LATEST_BLOW_S
        pids = self.begin(doing)
        blow = Blow(target, number, delay_s, for_good, _among(pids, target), self.kernel.pid)
        what = f"{blow} {doing}"
        try:
            reply = self.answer(what, self._code(DOINGS[doing]), blow)
            if target == "kernel" and number != signal.SIGSTOP:
                support.eventually(lambda: not is_alive(blow.kernel))
                self.kernel.close(now=True)
                self._await_end_of_all(what)
                self.kernel.start()
            else:
                self.go_on(what, pids)
        finally:
            blow.let_go()
        return f"{what}: {reply.status} {reply.evalue.partition(chr(10))[0]}"

    def _await_end_of_all(self, what: str) -> None:
        try:
            support.eventually(lambda: not support.leftovers())
        except AssertionError:
            raise AssertionError(f"left after {what}: {support.leftovers()}") from None

    def begin(self, doing: str) -> Pids:
        """Two ranks that are ready, with a variable each, and what has to be done first."""
        self.kernel.run_well("%load_ext ddp_notebook")
        if not self.kernel.ask(f"{SESSION}.ready"):
            self.kernel.run_well("%ddp_init --world-size 2")
        self.kernel.run_well("%%ddp\nkept = rank + 100")
        for code in BEFORE.get(doing, ()):
            self.kernel.run_well(self._code(code))
        return self.kernel.pids() if doing not in ("load", "init") else NOBODY

    def _code(self, code: str) -> str:
        return code.format(script=self.script, paused=self.paused)

    def go_on(self, what: str, before: Pids) -> None:
        """What a user types then: who lived on keeps variables, and the next start works."""
        self.kernel.run_well("%load_ext ddp_notebook")
        self.answer(f"abort after {what}", "%ddp_abort")
        if self.kernel.ask(f"{RUNNING} and {SESSION}.ready"):
            ranks = self.kernel.pids().ranks
            kept = [n for n, pid in enumerate(ranks) if pid in before.ranks and is_alive(pid)]
            for rank in kept:
                if not what.endswith(" step"):
                    code = f"%%ddp --ranks {rank}\nassert kept == rank + 100"
                    has = self.answer(f"variables after {what}", code)
                    if "is stopped" in has.evalue:  # behind a script that was aborted
                        self.answer(f"abort again after {what}", "%ddp_abort")
                    else:
                        assert has.status == "ok", f"{what}: rank {rank} lost its variables"
        self.answer(f"the next after {what}", self.choose.choice(NEXT))
        if self.kernel.ask(
            f"{RUNNING} and {SESSION}.ready and not {SESSION}.record.snapshot.ready"
        ):
            self.answer(f"restart after {what}", "%ddp_restart")  # it died behind a script
        if not self.kernel.ask(f"{RUNNING} and {SESSION}.ready"):
            reply = self.answer(f"init after {what}", DOINGS["init"])
            assert reply.status == "ok", f"the next init after {what}: {reply.evalue}"
        self.kernel.run_well(
            "%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nassert x == dist.get_world_size()"
        )


def _among(pids: Pids, target: str) -> Sequence[int]:
    if not pids.fork_server:
        return ()
    one = {"fork server": pids.fork_server, "controller": pids.controller, "store": pids.store}
    return pids.ranks if target == "rank" else (one.get(target, 0),)


if __name__ == "__main__":
    sys.exit(random_rounds.main(Kills, 60))
