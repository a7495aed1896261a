"""A run of real ranks is kept, and is the same to a fresh process that has no cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import eventually

from ddp_notebook.model import Status
from ddp_notebook.session import InitOptions, Session

TRAIN = """
from torch import nn
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("only with", "--output")
total = torch.ones(3)
if rank == 2:
    raise ValueError("no data on this rank")
dist.all_reduce(total)
"""
READ = """
import json, sys
from ddp_notebook import Session
replay = Session.replay(sys.argv[1])
rows = [[list(r.ranks), r.status, r.text, r.pid] for r in replay.status().rows]
print(json.dumps({
    "why": replay.why().to_json(),
    "rows": rows,
    "where": {rank: str(path[-1]) for rank, path in replay.where().items()},
    "set up": replay.at(-replay.duration_s).headline,
    "issued": {rank: len(each) for rank, each in replay.collectives.of.items()},
    "loaded": [name for name in ("torch", "ipyparallel") if name in sys.modules],
}))
"""


class Saved:
    """What the session said when it was saved, and the file."""

    def __init__(self, session: Session, path: Path) -> None:
        self.why = session.why().to_json()
        session.save(path)
        board = session.status()
        self.rows = [[list(r.ranks), r.status, r.text, r.pid] for r in board.rows]
        self.path = path
        self.wire = json.loads(path.read_text())
        self.events: list[dict[str, Any]] = self.wire["traceEvents"]


@pytest.fixture(scope="module")
def saved(
    nothing_left_behind_by_the_module: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Saved]:
    """A job of four ranks that trained, and whose last all_reduce rank 2 never joined."""
    session = Session()
    try:
        session.init(InitOptions(world_size=4, device="cpu"))
        session.run_cell(TRAIN)
        kept = Saved(session, tmp_path_factory.mktemp("saved") / "run.json")
    finally:
        session.shutdown()
    yield kept


def test_a_fresh_process_without_a_cluster_says_the_same(saved: Saved) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", READ, str(saved.path)], capture_output=True, text=True, check=True
    )
    told = json.loads(shown.stdout)
    # Which run it was, and what it wrote, is not in a file without --output.
    of_the_session = {"run", "tracebacks"}
    assert {k: v for k, v in told["why"].items() if k not in of_the_session} == {
        k: v for k, v in saved.why.items() if k not in of_the_session
    }
    assert told["why"]["findings"][0]["ranks"] == [2]
    assert told["rows"] == saved.rows
    assert told["where"] == dict.fromkeys(("0", "1", "3"), "cell 1, line 14")
    loading = "4 ranks, gloo: torch is being loaded"  # where no fork server had it yet
    assert told["set up"] in ("4 ranks, gloo: starting", loading)
    assert told["loaded"] == []
    # One more all_reduce where it was not the one that raised.
    issued = {int(rank): count for rank, count in told["issued"].items()}
    assert issued[0] == issued[1] == issued[3] == issued[2] + 1


def test_every_rank_has_its_track_with_all_collectives(saved: Saved) -> None:
    names = {e["pid"]: e["args"]["name"] for e in saved.events if e["name"] == "process_name"}
    assert sorted(names.values()) == [f"rank {rank}" for rank in range(4)]
    replay = Session.replay(saved.path)
    drawn = Counter(e["pid"] for e in saved.events if e.get("cat") == "collective")
    assert {names[pid]: count for pid, count in drawn.items()} == {
        f"rank {rank}": len(issued) for rank, issued in replay.collectives.of.items()
    }
    for pid in names:
        stages = [e["name"] for e in saved.events if e.get("cat") == "setup" and e["pid"] == pid]
        assert stages[0] == "launched"
        assert stages[-1] == "verified"


def test_durations_are_those_of_the_run(saved: Saved) -> None:
    whole_us = Session.replay(saved.path).duration_s * 1e6
    slices = [e for e in saved.events if e["ph"] == "X"]
    assert all(0 <= e["ts"] <= e["ts"] + e["dur"] <= whole_us + 1e5 for e in slices)
    hung = [e for e in slices if e["cat"] == "collective" and "unfinished" in e["args"]]
    assert len(hung) == 3
    assert {e["args"]["place"] for e in hung} == {"cell 1, line 14"}
    end = max(e["ts"] + e["dur"] for e in slices)
    assert all(e["ts"] + e["dur"] == pytest.approx(end, abs=1) for e in hung)


def test_what_is_in_a_cell_is_drawn_within_it(saved: Saved) -> None:
    """Events and collectives are stamped with different clocks."""
    for pid in {e["pid"] for e in saved.events}:
        mine = [e for e in saved.events if e["ph"] == "X" and e["pid"] == pid]
        (cell,) = [e for e in mine if e["cat"] == "cell"]
        for e in mine:
            if e["cat"] == "collective" and "unfinished" not in e["args"]:
                assert cell["ts"] - 1e3 <= e["ts"]
                assert e["ts"] + e["dur"] <= cell["ts"] + cell["dur"] + 1e3


def test_nothing_on_one_thread_overlaps(saved: Saved) -> None:
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for e in saved.events:
        if e["ph"] == "X":
            by_thread.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in by_thread.values():
        spans.sort()
        assert all(one[1] <= other[0] + 0.002 for one, other in pairwise(spans))


def test_what_the_ranks_wrote_is_not_in_it(saved: Saved) -> None:
    assert saved.wire["ddp_notebook"]["outputs"] == []
    assert "only with --output" not in saved.path.read_text()


def test_of_what_lies_beside_a_script_only_what_ranks_were_seen_in_is_kept(
    ranks2: Session, tmp_path: Path
) -> None:
    files = {
        "train.py": "import torch.distributed as dist, helper\n"
        "dist.init_process_group('gloo')\nif dist.get_rank() == 0:\n    helper.total()\n",
        "helper.py": "import torch, torch.distributed as dist\n"
        "def total():\n    dist.all_reduce(torch.ones(1))\n",
        "keys.py": "KEY = 'nobody else may read this'\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    stuck = ranks2.run_script(str(tmp_path / "train.py"))
    saved = tmp_path / "run.json"
    try:
        ranks2.save(saved)
    finally:
        ranks2.abort()
    replay = Session.replay(saved)
    assert stuck.diagnosis is not None and stuck.diagnosis.wrong
    assert replay.why().findings == stuck.diagnosis.findings
    assert replay.saved.case is not None
    assert replay.saved.case.sources.keys() == {"train.py", "helper.py"}
    assert "nobody else may read this" not in saved.read_text()


def test_a_run_is_saved_while_it_runs_and_after_a_death(session: Session, tmp_path: Path) -> None:
    session.init(InitOptions(world_size=2, device="cpu"))
    cell = threading.Thread(
        target=session.run_cell,
        args=("import os, time\nif rank: os._exit(7)\ntime.sleep(600)",),
        daemon=True,
    )
    cell.start()
    eventually(lambda: session.record.snapshot.with_status(Status.DEAD), 20, "the death")
    session.save(tmp_path / "run.json")
    session.abort()
    cell.join(20)
    assert not cell.is_alive()
    session.shutdown()
    replay = Session.replay(tmp_path / "run.json")
    assert [row.text for row in replay.status().rows][1].startswith("exited with code 7")
    marks = [e["name"] for e in replay.trace()["traceEvents"] if e["ph"] == "i"]
    assert marks == ["exited with code 7"]
