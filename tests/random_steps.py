"""Random walks of steps through a training script: what it computes stays the same to the bit.

`python tests/random_steps.py WALKS`; `DDP_NOTEBOOK_SEED` is that of the first walk.
`tests/contract/test_random_steps.py` walks a few times.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from support import SEED, shared_session

from ddp_notebook.errors import DDPError, UsageMistake
from ddp_notebook.rank.calls import Breakpoint, How
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.session.runs.endings import CellResult

RANKS = 4
WITHIN_S = 60.0
SCRIPTS = 0.1
"""The share of walks through a script, whose processes are new, in place of a cell."""
MOVES = 12
"""At most, in a walk, before all are let go."""
WAYS = (How.NEXT, How.NEXT, How.NEXT, How.INTO, How.OUT, How.END)
BREAK = "        loss = net(x).square().mean()\n"
TRAINS = f"""\
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.last = torch.nn.Linear(16, 1)

    def forward(self, x):
        y = torch.relu(self.first(x))
        return self.last(y)

def batches(rank, steps):
    for number in range(steps):
        yield torch.full((4, 8), float(number + rank))

def train(steps):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank = dist.get_rank()
    net = DDP(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x in batches(rank, steps):
        optimizer.zero_grad()
{BREAK}\
        loss.backward()
        if rank % 2:
            scale = 0.5
        else:
            scale = 0.25
        optimizer.param_groups[0]["lr"] *= 1 + scale * 0
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append((loss.item().hex(), total.item().hex()))
    return losses

if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(dist.get_rank(), train(6))
    dist.barrier()
    dist.destroy_process_group()
"""
LINE = TRAINS.splitlines().index(BREAK.rstrip("\n")) + 1


def losses(result: CellResult, session: Session) -> str:
    """What all ranks printed: their losses, in the order of ranks."""
    assert result.error is None, result.error
    run = session.runs.all[-1]
    assert not run.pending, f"{run.pending} have not ended"
    texts = {item.text for group in result.outputs for item in group.items}
    lines = {line for text in texts for line in text.splitlines() if line[:1].isdecimal()}
    assert len(lines) == RANKS, lines
    return "\n".join(sorted(lines))


def begin(session: Session, script: Path, as_script: bool) -> CellResult:
    """Train, in processes of its own or in a cell."""
    if as_script:
        return session.run_script(str(script))
    load = f"import sys\nsys.path.insert(0, {str(script.parent)!r})\nimport {script.stem}\n"
    return session.run_cell(f"{load}print(rank, {script.stem}.train(6))\n")


def walk(session: Session, script: Path, choose: random.Random) -> tuple[str, Counter[str]]:
    """The losses of a run that is stepped at random; and what was done."""
    done: Counter[str] = Counter()
    session.breakpoints.add(f"{script}:{LINE}", Breakpoint(0, count=choose.randint(1, 5)))
    result = begin(session, script, as_script=choose.random() < SCRIPTS)
    for _ in range(choose.randint(1, MOVES)):
        stops = sorted(session.runs.all[-1].stops)
        if not stops:
            break
        how = choose.choice(WAYS)
        some = choose.sample(stops, choose.randint(1, len(stops)))
        ranks = tuple(sorted(some)) if choose.random() < 0.5 else None
        done[f"{how}{' of some' if ranks else ''}"] += 1
        try:
            session.step(ranks, to="end") if how is How.END else session.step(ranks, how=how)
        except UsageMistake as error:
            raise AssertionError(f"{how} of {ranks} with {stops} paused: {error}") from error
    session.breakpoints.clear()  # to the end of the run, and not to the next hit
    if session.runs.all[-1].stops:
        session.step(to="end")
    result = session.wait(WITHIN_S)
    assert not session.runs.all[-1].stops, "one --to end does not free all"
    return losses(result, session), done


def main(walks: int) -> int:
    """Walk so often; the exit status."""
    options = InitOptions(world_size=RANKS, device="cpu")
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, shared_session(options) as session:
        script = Path(folder).resolve() / "walked_through.py"
        script.write_text(TRAINS)
        wanted = losses(begin(session, script, as_script=True), session)
        for number in range(walks):
            try:
                seen, moves = walk(session, script, random.Random(SEED + number))
                assert seen == wanted, f"other losses:\n{seen}\n{wanted}"
            except (AssertionError, DDPError) as error:
                print(f"DDP_NOTEBOOK_SEED={SEED + number}, walk {number}: {error}")
                return 1
            done += moves
            if number % 20 == 19:
                print(f"{number + 1} walks", flush=True)
    steps = ", ".join(f"{count} {what}" for what, count in sorted(done.items()))
    print(f"{walks} walks, seed {SEED}: the same losses to the bit, nobody stranded. {steps}")
    return 0


if __name__ == "__main__":
    sys.exit(main(int((sys.argv[1:] or ["20"])[0])))
