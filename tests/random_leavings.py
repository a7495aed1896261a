"""Pauses at breakpoints that are left at random: ranks are freed or ended, and nothing stays.

`python tests/random_leavings.py ROUNDS` leaves often, in real kernels;
`tests/contract/test_random_leavings.py` leaves a few times. `DDP_NOTEBOOK_SEED` makes others.
"""

from __future__ import annotations

import os
import sys
import threading

import random_rounds
import support
from kernels import Reply
from random_rounds import OURS, SESSION

from ddp_notebook.launch.timeouts import scaled_for_load

ENDS_WITHIN_S = 10.0
LATEST_S = 0.4
"""A signal comes so long after what is typed, at most."""
TRAIN = """\
def train(rank, kept):
    net = DDP(torch.nn.Linear(4, 1))
    for step in range(3):
        loss = net(torch.ones(2, 4)).sum()
        {stop}
        loss.backward()
    dist.all_reduce(torch.ones(1))
"""
STOPS = {
    "all at a line": "breakpoint()",
    "one at a line, one in a collective": "if rank == 0: breakpoint()",
    "one at a line, one busy": "breakpoint() if rank == 0 else time.sleep(600)",
    "all in a hook": "loss.register_hook(lambda grad: breakpoint())",
    "one in a thread": "threading.Thread(target=breakpoint).start() if rank else breakpoint()",
}
"""What stands in the training loop, by who is paused then."""
HEAD = """\
import threading, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
"""
SCRIPT = f"""{HEAD}{{train}}
dist.init_process_group("gloo")
train(dist.get_rank(), 1)
dist.destroy_process_group()
"""
MOVES = ("%ddp_step", "%ddp_step --ranks 0", "%ddp_step --into", "%ddp_step --to end")
KEEPS = ("abort", "abort one", "interrupt")
"""These free the ranks; their variables stay."""
FRESH = ("restart", "restart one after abort", "shutdown", "unload")
ENDS = ("kernel killed", "kernel terminated", "kernel restarted", "kernel shut down")
LEAVINGS = (*KEEPS, *FRESH, *ENDS)


class Leavings(random_rounds.Rounds):
    """Rounds in which ranks are paused, and the pause is left."""

    def play(self, leavings: tuple[str, ...] = LEAVINGS) -> str:
        """One round, left in one of these ways."""
        leaving, stop = self.choose.choice(leavings), self.choose.choice(list(STOPS))
        as_script = self.choose.random() < 0.3
        moves = [self.choose.choice(MOVES) for _ in range(self.choose.randrange(3))]
        where = "script" if as_script else "cell"
        what = f"{leaving}, {where}, {stop}{', moved' * len(moves)}"
        self._begin()
        before = self.kernel.pids()
        self._pause(what, stop, as_script=as_script)
        for move in moves:
            if self.kernel.ask(f"bool({SESSION}.runs.all[-1].stops)"):
                self._ends(what, move, signalled="busy" in stop)
        left = self._processes()
        if leaving in ENDS:
            self._end_kernel(leaving)
            support.eventually(lambda: not support.leftovers(), what=f"the end of all: {what}")
            return what
        self._leave(what, leaving)
        gone = set(left) - set(self._processes())
        if leaving in KEEPS:
            assert not gone & set(before.all), f"{what}: of the session, {gone} ended"
            assert not as_script or gone, f"{what}: the script's processes live on"
        else:
            assert gone >= set(before.ranks[1:]), f"{what}: ranks live on"
        self._go_on(what, kept=leaving in KEEPS)
        return what

    def _begin(self) -> None:
        """Two ranks that are ready, with a variable each, in a new kernel where one has ended."""
        if not self.kernel.manager.has_kernel:
            self.kernel.start()
        self.kernel.run_well("%load_ext ddp_notebook")
        if not self.kernel.ask(f"{SESSION}.ready"):
            self.kernel.run_well("%ddp_init --world-size 2")
        self.kernel.run_well("%%ddp\nkept = rank + 100")

    def _pause(self, what: str, stop: str, *, as_script: bool) -> None:
        train = TRAIN.format(stop=STOPS[stop])
        if as_script:
            self.script.write_text(SCRIPT.format(train=train))
            code = f"%ddp_run {self.script}"
        else:
            code = f"%%ddp\n{HEAD}{train}train(rank, kept)"
        self._ends(what, code, signalled="busy" in stop)
        if "busy" not in stop:
            assert self.kernel.ask(f"bool({SESSION}.runs.all[-1].stops)"), f"{what}: none paused"

    def _ends(self, what: str, code: str, *, signalled: bool = False) -> Reply:
        """How a cell ended, with an interrupt where it would not end by itself."""
        message = self.kernel.send(code)
        delay_s = 0.1 + self.choose.random() * LATEST_S if signalled else 0.0
        timer = threading.Timer(delay_s, self.kernel.manager.interrupt_kernel)
        if signalled:
            timer.start()
        reply = self.kernel.finish(message, scaled_for_load(ENDS_WITHIN_S) + 10)
        if signalled:  # a cell that has ended by itself leaves none for the next one
            timer.cancel()
            timer.join()
        text = f"{what}: {code.partition(chr(10))[0]} ended with {reply.ename}: {reply.evalue}"
        assert reply.ename in OURS, f"raw: {text}\n{reply.text}"
        assert "Exception in thread" not in reply.text, f"{text}\n{reply.text}"
        return reply

    def _processes(self) -> list[int]:
        return [process.pid for process in support.our_processes()]

    def _leave(self, what: str, leaving: str) -> None:
        if leaving == "interrupt":  # of a line that does not end, or of the wait for the others
            self._ends(what, "%ddp_wait", signalled=True)
            self._ends(what, "%ddp_abort")
        elif leaving == "abort one":
            self._ends(what, "%ddp_abort --ranks 0")
            self._ends(what, "%ddp_abort")
        elif leaving == "restart one after abort":
            self._ends(what, "%ddp_abort")
            self._ends(what, "%ddp_restart --ranks 1")
        else:
            verb = {"unload": "%unload_ext ddp_notebook"}.get(leaving, f"%ddp_{leaving}")
            self._ends(what, verb)

    def _end_kernel(self, leaving: str) -> None:
        kernel = self.kernel
        if leaving == "kernel restarted":
            kernel.restart(now=self.choose.random() < 0.5)
            kernel.close()
        elif leaving == "kernel shut down":
            kernel.close()
        else:
            pid = kernel.pid
            os.kill(pid, 9 if leaving == "kernel killed" else 15)
            support.eventually(lambda: not support.is_alive(pid))
            kernel.close(now=True)

    def _go_on(self, what: str, *, kept: bool) -> None:
        """What a user types then works, and nothing is paused any more."""
        self.kernel.run_well("%load_ext ddp_notebook")
        if not self.kernel.ask(f"{SESSION}.ready"):
            assert not kept, f"{what}: the session is not ready"
            reply = self._ends(what, "%ddp_init --world-size 2")
            assert reply.status == "ok", f"init after {what}: {reply.evalue}"
        check = "assert kept == rank + 100\n" if kept else ""
        reply = self._ends(
            what, f"%%ddp\n{check}x = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == 2"
        )
        assert reply.status == "ok", f"the next cell after {what}: {reply.evalue}\n{reply.text}"


if __name__ == "__main__":
    sys.exit(random_rounds.main(Leavings, 50))
