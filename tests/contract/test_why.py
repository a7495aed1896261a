"""What a rank raised is always shown, and `%ddp_why` tells of the last run until the next one."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from support import eventually, stuck

from ddp_notebook.bench.plan import Plan
from ddp_notebook.errors import CellFailed, CellInterrupted, UsageMistake
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Activity, Category, Status
from ddp_notebook.views import board as views_board
from ddp_notebook.views import findings, stacks

pytestmark = pytest.mark.timeout(120)

RAISES = """\
def load(settings):
    return settings['key7']
def prepare():
    return load({})
if rank == 1:
    prepare()
dist.barrier()"""
SILENCED = """\
import ctypes, threading
def keep_pythons_lock():
    library = ctypes.PyDLL(None)  # a call of it keeps Python's lock
    while not stuck.exists():
        threading.Event().wait(0.01)
    held.touch()
    library.close(library.open(str(key).encode(), 0))
if rank == 0:
    threading.Thread(target=keep_pythons_lock, daemon=True).start()
if rank == 1:
    raise KeyError('a')
dist.all_reduce(torch.ones(1))"""
MARKUP = "if rank == 2: raise ValueError('<b>bold</b> \\x1b[2J\\x1b[31mred')\ndist.barrier()"
WORKER = """\
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

dist.init_process_group("gloo")


class Samples(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        if dist.get_rank() == 1:
            raise KeyError("sample 3")
        return torch.ones(1)


for batch in DataLoader(Samples(), num_workers=1):
    dist.all_reduce(batch)
"""
CHAINED = """\
import torch.distributed as dist

dist.init_process_group("gloo")


def step():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise RuntimeError("step failed") from error


if dist.get_rank() == 2:
    step()
dist.barrier()
"""


def test_the_traceback_of_the_rank_that_raised_is_shown_below_wherever_one_looks(
    ranks: Any,
) -> None:
    diagnosis = stuck(ranks, RAISES)
    (finding,) = diagnosis.findings
    assert finding.category is Category.EXCEPTION_ON_ONE_RANK
    assert (finding.ranks, finding.waiting) == ((1,), (0, 2))
    assert finding.cause == "Rank 1 raised KeyError: 'key7' at cell 7, line 3, in load"
    assert finding.evidence[0] == (
        "rank 1: cell 7, line 7 → cell 7, line 5, in prepare → cell 7, line 3, in load: "
        "return settings['key7']"
    )
    for shown in (diagnosis, ranks.why()):
        (traceback,) = shown.tracebacks
        assert traceback.ranks == (1,)
        text = findings.text(shown)
        marked = "rank 1 raised in here: line 3, `return settings['key7']`: KeyError: 'key7'"
        assert text.startswith("✗ Rank 1 raised KeyError")
        assert 0 < text.index(marked) < text.index("----> 3     return settings['key7']")
        assert "ranks 0 and 2 wait here" in text
    for _ in range(2):  # however often it is asked
        (group,) = ranks.wait(0).tracebacks
        assert group.ranks == (1,) and "key7" in group.items[0].text
    assert "----> 3     return settings['key7']" in ranks.output(1)
    tree = ranks.where()
    assert tree.branches[0].ranks == (1,) and tree.stack(1).doing.activity is Activity.FAILED
    assert [frame.line for frame in tree.stack(1).frames] == [7, 5, 3]
    assert "return settings['key7']" in stacks.text(tree)


def test_why_tells_of_the_last_run_and_names_it_until_the_next_begins(ranks: Any) -> None:
    stuck(ranks, RAISES)
    assert not ranks.why().run.over
    ranks.abort()
    for _ in range(2):
        after = ranks.why()
        assert after.run.over and after.run.title == "cell 7" and after.run.age_s >= 0
        assert [finding.ranks for finding in after.findings] == [(1,)]
        assert [traceback.ranks for traceback in after.tracebacks] == [(1,)]
        text = findings.text(after)
        assert text.startswith("From cell 7 (") and "ranks 0 and 2 wait here" in text
        assert after.to_json()["run"]["title"] == "cell 7" and after.to_json()["run"]["over"]
    ranks.restart((1,))
    assert ranks.why().findings, "new processes are no new run"
    assert ranks.run_cell("x = 1").error is None
    assert findings.text(ranks.why()).startswith("✓ No problem found.")


def test_of_a_rank_that_dies_after_a_hang_was_freed_its_death_is_told_first(ranks: Any) -> None:
    stuck(ranks, "if rank == 0:\n    dist.barrier()\ndist.all_reduce(torch.ones(2))")
    ranks.abort()
    os.kill(ranks.record.snapshot.ranks[1].pid, signal.SIGKILL)
    eventually(lambda: ranks.record.snapshot.with_status(Status.DEAD), what="rank 1 is dead")
    now = ranks.why_now()
    assert [(f.category, f.ranks) for f in now.findings] == [(Category.RANK_DIED, (1,))]
    both = ranks.why()
    assert [f.ranks for f in both.findings] == [(1,), (0,)], "the death, then what was found before"
    assert "Rank 1 ended after cell 7 was over." in findings.text(both)
    ranks.restart((1,))
    assert [f.ranks for f in ranks.why().findings] == [(0,)]


BESIDE = """\
import threading
def report():
    raise ConnectionError('no telemetry')
thread = threading.Thread(target=report); thread.start(); thread.join()
dist.barrier()"""
STARTED = """\
import multiprocessing, time
if rank == 1:
    child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,))
    child.start()
    child.join()
dist.barrier()"""


def test_a_thread_that_raises_and_that_nobody_waits_for_is_no_mistake(ranks: Any) -> None:
    assert ranks.run_cell(BESIDE).error is None
    assert not ranks.why().findings, "nobody waits for that thread"


def test_a_rank_that_polls_a_collective_or_a_key_which_cannot_come_is_not_busy(ranks: Any) -> None:
    source = """\

import time
if rank != 1:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    while not work.is_completed():
        time.sleep(0.01)"""
    (finding,) = stuck(ranks, source).findings
    assert (finding.category, finding.waiting) == (Category.CONDITIONAL_COLLECTIVE, (0, 2))
    assert finding.sides[0].place.line == 5, "line 2 is empty"
    assert "move it out of `if rank != 1`" in finding.remedy
    ranks.abort()
    source = """\
store = dist.distributed_c10d._get_default_store()
while not store.check(['x']):
    pass"""
    (finding,) = stuck(ranks, source).findings
    assert finding.category is Category.UNSET_KEY and "'x'" in finding.cause
    ranks.abort()
    source = """\
store = dist.distributed_c10d._get_default_store()
store.set(f'done/{rank + (rank == 2)}', '1')
store.wait([f'done/{r}' for r in range(3)])"""
    (finding,) = stuck(ranks, source).findings
    assert (finding.category, finding.ranks) == (Category.UNSET_KEY, (0, 1, 2))
    assert "No rank will set the store's key 'done/2'" in finding.cause
    assert "rank 2 has set 'done/3'" in finding.evidence
    ranks.abort()
    late = """\
import time
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    time.sleep(2.5)
    store.set('there', '1')
while not store.check(['there']):
    time.sleep(0.01)"""
    assert ranks.run_cell(late).error is None
    assert not ranks.why().findings


def test_of_a_rank_that_waits_for_a_process_of_its_own_it_is_told_where_it_stands(
    ranks: Any,
) -> None:
    ranks.run_cell(STARTED, detach=True)

    def waits() -> Any:
        """What is found of rank 1, once it has stood there for some seconds."""
        told = [f for f in ranks.why().findings if f.ranks == (1,)]
        return next(
            (f for f in told if "it has been in ForkProcess.join (cell " in str(f.evidence)), None
        )

    told = eventually(waits, 20, "it waits")
    assert told.passing
    ranks.abort()


def test_where_ranks_stand_that_wait_for_nothing_of_others_is_told_while_they_run(
    ranks: Any,
) -> None:
    ranks.run_cell("import queue\nqueue.Queue().get()", detach=True)
    run = ranks.runs.all[-1]
    eventually(lambda: "ranks 0-2 have been in Queue.get (cell " in run.waits_for, 30)
    assert not ranks.why().findings and not run.done, "something of theirs may still come"
    assert "in Queue.get (cell " in (ranks.why().doing or {})[1]
    ranks.abort()


@pytest.mark.parametrize(
    ("source", "category", "who"),
    [
        ("raise ValueError('boom')", Category.EXCEPTION, (0, 1, 2)),
        ("assert rank == 1", Category.EXCEPTION_ON_ONE_RANK, (0, 2)),
        ("dist.init_process_group('gloo', world_size=9)", Category.DOUBLE_INIT, (0, 1, 2)),
    ],
)
def test_a_cell_that_failed_is_told_of_by_why(
    ranks: Any, source: str, category: Category, who: tuple[int, ...]
) -> None:
    with pytest.raises(CellFailed):
        ranks.run_cell(source, number=8).raise_for_error()
    after = ranks.why()
    (finding,) = after.findings
    assert (finding.category, finding.ranks, after.run.title) == (category, who, "cell 8")
    assert [traceback.ranks for traceback in after.tracebacks] == [who]


def test_ranks_whose_code_destroyed_their_group_are_not_ready(
    ranks: Any,
) -> None:
    ranks.run_cell("dist.destroy_process_group()", number=8).raise_for_error()
    text = views_board.text(ranks.status())
    assert "no group" in text and "ready" not in text and "verified" not in text
    assert "Make a new one: %ddp_abort" in text
    why = ranks.why()
    assert not why.findings and not why.proven
    assert "Ranks 0-2 have no process group" in why.headline and "%ddp_abort" in why.headline
    with pytest.raises(CellFailed):
        ranks.run_cell("dist.barrier()", number=9).raise_for_error()
    (finding,) = ranks.why().findings
    assert "%ddp_abort" in finding.remedy.partition(".")[0]
    with pytest.raises(UsageMistake, match=r"no process group, .* %ddp_abort"):
        ranks.bench(Plan())

    ranks.abort()
    assert ranks.status().snapshot.ready and "6/6 verified" in views_board.text(ranks.status())
    own = "dist.destroy_process_group()\ndist.init_process_group('gloo')\ndist.barrier()"
    ranks.run_cell(own, number=10).raise_for_error()
    assert "no group" not in views_board.text(ranks.status()) and ranks.why().proven
    ranks.run_cell("dist.destroy_process_group()", number=11).raise_for_error()
    ranks.init(ranks.options)
    ranks.run_cell("dist.barrier()", number=12).raise_for_error()


def test_a_rank_whose_process_became_another_program_is_told_as_that_and_soon(ranks: Any) -> None:
    began_s = time.monotonic()
    found = stuck(
        ranks, "import os\nif rank == 1: os.execv('/bin/sleep', ['sleep', '60'])\ndist.barrier()"
    )
    (finding,) = found.findings
    assert (finding.category, finding.ranks, finding.waiting) == (Category.UNDECIDED, (1,), (0, 2))
    assert "Rank 1 runs another program now, as after `os.exec`: sleep 60" in finding.sentence
    assert finding.commands == ("%ddp_restart --ranks 1",)
    assert time.monotonic() - began_s < scaled_for_load(10)
    ranks.restart((1,))


def test_a_refused_collective_and_a_wrong_result_are_told_of_by_why(ranks: Any) -> None:
    refused = stuck(ranks, "dist.all_reduce(torch.ones(2 + rank % 2))")
    assert refused.findings[0].category is Category.SHAPE_MISMATCH
    assert "guard.py" not in findings.text(refused), "frames of ours say nothing to a user"
    ranks.abort()
    assert [f.category for f in ranks.why().findings] == [Category.SHAPE_MISMATCH]
    silent = ranks.run_cell(
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    model.module(torch.ones(1, 2) + rank).sum().backward()\n"
        "    optimizer.step()"
    )
    assert silent.error is None and silent.diagnosis is not None
    assert ranks.why().findings == silent.diagnosis.findings


def test_a_message_with_markup_is_escaped_and_a_long_one_is_bounded(ranks: Any) -> None:
    diagnosis = stuck(ranks, MARKUP)
    page, text = findings.html(diagnosis), findings.text(diagnosis)
    assert "<b>bold</b>" not in page and "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "\x1b" not in page and "\x1b" not in text
    ranks.abort()
    result = ranks.run_cell("print('x' * 2_000_000)\nraise ValueError('y' * 5_000_000)")
    (group,) = result.tracebacks
    assert "ValueError" in group.items[0].text and len(group.items[0].text) < 50_000
    assert len(findings.text(ranks.why())) < 200_000


def test_a_script_tells_where_it_raised_also_of_chains_workers_and_threads(
    ranks: Any, tmp_path: Path
) -> None:
    train = tmp_path / "train.py"
    train.write_text(CHAINED, "utf-8")
    error = ranks.run_script(str(train)).error
    assert error.diagnosis.findings[0].cause.endswith(
        " raised RuntimeError: step failed at train.py, line 10, in step"
    )
    assert "ZeroDivisionError" in error.diagnosis.tracebacks[0].text
    ranks.abort()
    assert ranks.why().run.title == "train.py" and ranks.why().findings
    train.write_text(WORKER, "utf-8")
    ranks.run_script(str(train), detach=True)
    error = ranks.wait().error
    assert error.diagnosis.findings[0].cause.endswith(
        " raised KeyError: 'sample 3' (Caught KeyError in DataL… "
        "at train.py, line 14, in __getitem__"
    )
    ranks.abort()
    result = ranks.run_cell(
        "import threading\n"
        "def work():\n"
        "    if rank == 1: raise ValueError('in a thread')\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()"
    )
    (group,) = result.tracebacks
    assert group.ranks == (1,) and "ValueError: in a thread" in group.items[0].text


NO_MORE_FILES = """
import resource
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, most))
    opened = [open(__file__) for _ in range(1000)]
dist.all_reduce(torch.ones(1))
"""


def test_a_script_that_may_open_no_more_files_can_still_tell_its_error(
    ranks: Any, tmp_path: Path
) -> None:
    train = tmp_path / "train.py"
    train.write_text(NO_MORE_FILES, "utf-8")
    finding = ranks.run_script(str(train)).error.diagnosis.findings[0]
    assert (finding.category, finding.ranks) == (Category.RESOURCE_STARVED, (1,))
    ranks.abort()


def test_an_interrupt_keeps_what_was_found_and_is_no_finding_itself(ranks: Any) -> None:
    cell = "print('begun')\nif rank == 0: dist.barrier()"
    ranks.run_cell(cell, number=9, wait="forever", detach=True)
    before = eventually(lambda: ranks.runs.detached.found.diagnosis, what="a finding")
    ranks.abort()
    assert isinstance(ranks.wait().error, CellFailed | CellInterrupted)
    after = ranks.why()
    assert after.run.title == "cell 9" and after.run.over
    assert after.findings == before.findings
    ranks.run_cell("import time\nprint('begun')\ntime.sleep(60)", detach=True)
    eventually(lambda: ranks.runs.current.events.written(0), what="a cell that runs")
    assert findings.text(ranks.why()).startswith("► No problem found so far: ranks 0-2 are still")
    ranks.abort()
    ranks.wait()
    text = findings.text(ranks.why())
    assert text.startswith("► No problem was found before ranks 0-2 were interrupted.")


def test_of_an_interrupted_run_it_is_still_told_which_rank_was_late(ranks: Any) -> None:
    ranks.run_cell("import time\nif rank == 1: time.sleep(60)\ndist.barrier()", detach=True)
    eventually(
        lambda: ranks.runs.current.detector and ranks.runs.current.detector.seen_late, 20, "late"
    )
    ranks.abort()
    ranks.wait()
    after = ranks.why()
    assert [(f.category, f.ranks, f.passing) for f in after.findings] == [
        (Category.STRAGGLER, (1,), True)
    ]
    assert "has not yet called `barrier`" in after.headline and after.run.over and not after.wrong


@pytest.mark.parametrize("before", ["interrupted", "raised", "finished"])
def test_a_rank_alone_in_a_barrier_names_who_does_not_run_it_however_their_last_cell_ended(
    ranks: Any, before: str
) -> None:
    """The end of an earlier cell was taken for the cause, or for no known state."""
    if before == "interrupted":
        ranks.run_cell("import time\nprint('begun')\ntime.sleep(60)", detach=True)
        eventually(lambda: ranks.runs.current.events.written(0), what="a cell that runs")
        ranks.runs.detached.stop()
        assert isinstance(ranks.wait().error, CellInterrupted)
    else:
        ranks.run_cell("raise ValueError(3)" if before == "raised" else "x = 1")
    result = ranks.run_cell("dist.barrier()", ranks=(0,))
    (finding,) = result.diagnosis.findings
    assert (finding.category, finding.ranks) == (Category.MISSING_RANK, (1, 2))
    assert finding.waiting == (0,)
    assert (ranks.why().findings[0].category, ranks.why().findings[0].ranks) == (
        Category.MISSING_RANK,
        (1, 2),
    )
    ranks.abort()


def test_ranks_that_wait_for_what_is_no_store_get_no_green_sentence(
    ranks: Any, tmp_path: Path
) -> None:
    train = tmp_path / "train.py"
    with socket.create_server(("127.0.0.1", 0), backlog=64) as no_store:
        train.write_text(
            "import os\nimport torch.distributed as dist\n"
            f"dist.init_process_group('gloo', 'tcp://127.0.0.1:{no_store.getsockname()[1]}', "
            "rank=int(os.environ['RANK']), world_size=3)\n",
            "utf-8",
        )
        ranks.run_script(str(train), detach=True)
        eventually(lambda: ranks.why_now().doing and "store" in str(ranks.why_now().doing))
        diagnosis = ranks.why()
        assert not findings.text(diagnosis).startswith("✓")
        assert diagnosis.findings or "ranks 0-2 are waiting" in diagnosis.headline
    ranks.abort()


def test_a_rank_that_cannot_answer_for_a_while_is_still_said_to_wait(
    ranks: Any, tmp_path: Path
) -> None:
    stuck_file, held, key = (tmp_path / name for name in ("stuck", "held", "key"))
    os.mkfifo(key)
    paths = "\n".join(
        f"{name} = __import__('pathlib').Path({str(path)!r})"
        for name, path in (("stuck", stuck_file), ("held", held), ("key", key))
    )
    assert stuck(ranks, f"{paths}\n{SILENCED}").findings[0].waiting == (0, 2)
    stuck_file.touch()
    eventually(held.exists, 30)
    try:
        (finding,) = ranks.why().findings
        assert (finding.category, finding.ranks) == (Category.EXCEPTION_ON_ONE_RANK, (1,))
        assert finding.waiting == (0, 2)
    finally:
        key.open("w").close()
