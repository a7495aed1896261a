"""Jobs that were not prepared, by stacks alone: what is proven, and what healthy ones may show."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_notebook.jobs import outside as looked_at
from ddp_notebook.jobs import pyspy
from ddp_notebook.jobs.frames import Frame, Sources
from ddp_notebook.jobs.outside import Look, Outside, Seen, Used
from ddp_notebook.jobs.pyspy import Thread
from ddp_notebook.jobs.verdict import Outcome
from ddp_notebook.model import Category, GroupMade
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.rank.prepared.processes import parent

TORCH = "/venv/lib/python3.11/site-packages/torch/"
C10D, DDP = f"{TORCH}distributed/distributed_c10d.py", f"{TORCH}nn/parallel/distributed.py"
LOGGER, RENDEZVOUS = f"{TORCH}distributed/c10d_logger.py", f"{TORCH}distributed/rendezvous.py"
WATCHES = Thread("MainThread", True, (Frame(f"{TORCH}agent.py", 1, "_invoke_run"),), ({},))
ENDS = Thread("MainThread", True, (*WATCHES.frames, Frame("x.py", 1, "_stop_workers")), ({}, {}))
SCRIPT = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for step, batch in enumerate(data):
    loss = net(batch)
    loss.backward()
    if rank == 0:
        dist.barrier()
dist.all_reduce(total)
dist.send(total, 1 - rank)
dist.recv(total, 1 - rank)
if rank == 1:
    dist.broadcast(total, 0)
else:
    dist.broadcast(other, 0)
"""
ALL_REDUCE, BARRIER, SEND, RECV, IN_ONE_BRANCH = 9, 8, 10, 11, 13


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def stack(*frames: tuple[str, int, str, Mapping[str, str]]) -> tuple[Thread, ...]:
    """A main thread, the innermost frame first."""
    shown = tuple(Frame(file, line, name) for file, line, name, _ in frames)
    return (Thread("MainThread", True, shown, tuple(own for *_, own in frames)),)


def busy(script: str, line: int) -> tuple[Thread, ...]:
    return stack((script, line, "<module>", {}))


def waits(script: str, line: int, call: str, kwargs: str = "{}", **given: str) -> Any:
    """A main thread in a function of torch."""
    return stack(
        (C10D, 100, call, {"group": "<ProcessGroup at 0x7f>", **given}),
        (LOGGER, 83, "wrapper", {"args": "(<Tensor at 0x7f>)", "kwargs": kwargs}),
        (script, line, "<module>", {"step": "3"}),
    )


def backward(script: str) -> tuple[Thread, ...]:
    return stack(
        (f"{TORCH}autograd/graph.py", 979, "_engine_run_backward", {}),
        (f"{TORCH}_tensor.py", 623, "backward", {}),
        (script, 6, "<module>", {}),
    )


def seen(
    threads: Mapping[int, Any],
    before: Mapping[int, Any] | None = None,
    used: tuple[Used, Used] = (Used("S", 100, {}), Used("S", 100, {})),
    size: int = 0,
    launcher: Thread = WATCHES,
) -> Outside:
    """What two looks show of these ranks; the same in both by default."""
    size = size or len(threads)
    told = {"WORLD_SIZE": str(size), "GROUP_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
    ranks = {rank: Seen(1 << 30, 1, rank, size, "train.py", 1e11, told) for rank in threads}
    first, second = (
        Look(of, dict.fromkeys(threads, each), (launcher,))
        for of, each in zip((before or threads, threads), used, strict=True)
    )
    return looked_at.seen(ranks, first, second)


def found(outside: Outside) -> list[tuple[Category, tuple[int, ...]]]:
    findings = outside.verdict().diagnosis.findings
    return [(finding.category, finding.ranks) for finding in findings if not finding.passing]


def hangs(script: str) -> dict[int, Any]:
    """Rank 0 in a barrier under a test of the rank, the others in backward."""
    return {0: waits(script, BARRIER, "barrier"), 1: backward(script), 2: backward(script)}


@pytest.mark.parametrize(
    "later",
    [
        Used("S", 110, {}),
        Used("R", 100, {}),
        Used("S", 100, {"7": (0, 512)}),
    ],
    ids=["uses the CPU", "runs", "receives data"],
)
def test_nothing_is_said_of_a_job_that_moves(script: str, later: Used) -> None:
    verdict = seen(hangs(script), used=(Used("S", 100, {"7": (0, 0)}), later)).verdict()
    assert not verdict.diagnosis.findings and verdict.outcome is Outcome.UNDECIDED


GPU = Used("R", 100, {}, cuda=True)
"""It uses a GPU and spins, as a thread does that waits for one."""


def test_a_rank_that_stays_where_it_may_wait_for_its_gpu_does_not_count_as_going_on(
    script: str,
) -> None:
    now = {0: busy(script, ALL_REDUCE), 1: busy(script, SEND)}
    later = replace(GPU, ticks=250)
    verdict = seen(now, used=(GPU, later)).verdict()
    assert verdict.outcome is Outcome.UNDECIDED and not verdict.diagnosis.findings
    assert verdict.diagnosis.unsure.startswith("Undecided: ranks 0 and 1 did not leave train.py")
    assert "for a collective that another rank has not called" in verdict.diagnosis.unsure
    turns = {0: stack((script, ALL_REDUCE, "<module>", {"step": "4"})), 1: busy(script, RECV)}
    for before, used in ((turns, (GPU, later)), (now, (Used("R", 100, {}), Used("R", 250, {})))):
        unsure = seen(now, before=before, used=used).verdict().diagnosis.unsure
        assert unsure == "No problem found so far: ranks 0 and 1 go on."


def test_how_the_flight_recorder_is_dumped_is_said_where_a_pipe_was_set_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/tmp/my fr_"}
    monkeypatch.setattr(looked_at.processes, "environment", lambda pid: values)
    said = looked_at.how_to_dump(7)
    assert "for pipe in '/tmp/my fr_'*.pipe; do echo 1 > \"$pipe\"; done" in said
    assert said.endswith("ddp-notebook why FOLDER (TORCH_FR_DUMP_TEMP_FILE says which).")
    values["TORCH_FR_DUMP_TEMP_FILE"] = "/logs/run7/rank_"
    assert looked_at.how_to_dump(7).endswith("Then: ddp-notebook why /logs/run7.")
    values.clear()
    assert looked_at.how_to_dump(7) == ""


def test_nothing_is_said_of_a_rank_that_was_elsewhere_before_or_in_another_turn(
    script: str,
) -> None:
    now = hangs(script)
    for earlier in (waits(script, ALL_REDUCE, "all_reduce"), waits(script, BARRIER, "all_reduce")):
        assert not seen(now, before={**now, 0: earlier}).verdict().diagnosis.findings


@pytest.mark.parametrize(
    ("line", "call", "kwargs"),
    [
        (ALL_REDUCE, "all_reduce", "{}"),
        (BARRIER, "barrier", '{"group": <torch._C.ProcessGroup at 0x7f>}'),
        (IN_ONE_BRANCH, "broadcast", "{}"),
    ],
    ids=["at one line", "all in groups of their own", "the other branch calls it too"],
)
def test_ranks_that_wait_without_a_proof_are_undecided(
    script: str, line: int, call: str, kwargs: str
) -> None:
    other = waits(script, ALL_REDUCE, "all_reduce", kwargs)
    verdict = seen({0: waits(script, line, call, kwargs), 1: other}).verdict()
    assert not verdict.diagnosis.findings and verdict.outcome is Outcome.UNDECIDED
    assert "do not prove why" in verdict.diagnosis.unsure


def test_a_rank_that_is_busy_is_waited_for_and_is_no_mistake(script: str) -> None:
    before = {0: waits(script, ALL_REDUCE, "all_reduce"), 1: busy(script, 4)}
    verdict = seen({**before, 1: busy(script, 5)}, before).verdict()
    (finding,) = verdict.diagnosis.findings
    assert (finding.category, finding.ranks) == (Category.STRAGGLER, (1,)) and finding.passing
    assert verdict.outcome is Outcome.UNDECIDED and not finding.commands
    assert finding.evidence == ("rank 1: busy in train.py, line 5",)


def test_a_rank_that_does_nothing_is_not_said_to_be_busy(script: str) -> None:
    verdict = seen({0: waits(script, ALL_REDUCE, "all_reduce"), 1: busy(script, 5)}).verdict()
    (finding,) = verdict.diagnosis.findings
    assert (finding.category, finding.ranks) == (Category.UNDECIDED, ()) and not finding.passing
    assert "is waiting for rank 1, which is asleep or blocked" in finding.cause
    assert "used no CPU time" in finding.evidence[-1]


def test_a_rank_that_waits_for_its_gpu_in_backward_is_not_said_to_wait_for_others(
    script: str,
) -> None:
    on_gpu = Used("S", 100, {}, cuda=True)
    assert not found(seen(hangs(script), used=(on_gpu, on_gpu)))


def set_up(script: str, where: str, file: str, **given: str) -> tuple[Thread, ...]:
    return stack(
        (file, 190, where, given),
        (C10D, 1892, "init_process_group", {"rank": "-1", "world_size": "-1"}),
        (script, 2, "<module>", {}),
    )


def test_what_ranks_were_given_is_read_off_their_stacks_in_set_up(script: str) -> None:
    four = {
        rank: set_up(
            script, "_new_process_group_helper", C10D, group_size="4", group_rank=str(rank)
        )
        for rank in (0, 1)
    }
    assert found(seen(four)) == [(Category.WORLD_SIZE_MISMATCH, (0, 1))]
    absent = set_up(script, "_new_process_group_helper", C10D, group_size="2", group_rank="0")
    assert found(seen({0: absent}, size=2)) == [(Category.MISSING_RANK, (1,))]


def test_the_rank_with_another_port_is_named_only_where_the_right_port_is_known(
    script: str,
) -> None:
    given = {"group_size": "3", "backend": '"gloo"', "group_rank": "0"}
    ports = {0: set_up(script, "_new_process_group_helper", C10D, **given)}
    for rank, port in ((1, "4001"), (2, "4002")):
        own = {"hostname": '"10.0.0.1"', "port": port, "world_size": "3", "rank": str(rank)}
        ports[rank] = set_up(script, "_create_c10d_store", RENDEZVOUS, **own)
    assert not found(seen(ports))
    used = Used("S", 100, {}, reached=frozenset({29500}))
    assert found(seen(ports, used=(used, used))) == [(Category.ENV_MISMATCH, (1, 2))]


@pytest.mark.parametrize(
    ("name", "ranks", "made"),
    [("'3'", "[0, 2]", (GroupMade(3, (0, 2)),)), ("'of_mine'", "[0, 2]", ()), ("'3'", "[0, …", ())],
)
def test_the_group_that_a_rank_makes_is_read_off_its_stack(
    script: str, name: str, ranks: str, made: tuple[GroupMade, ...]
) -> None:
    given = {"group_name": name, "global_ranks_in_group": ranks}
    threads = stack(
        (C10D, 2200, "_new_process_group_helper", given),
        (C10D, 5900, "_new_group_with_tag", {"group_name": "None"}),
        (C10D, 5800, "new_group", {"ranks": "[0, 2]"}),
        (script, 2, "<module>", {}),
    )
    report, record = pyspy.report_of(0, threads, Sources(), still=True)
    assert (report.inside, report.initialized, record) == ("process-group", True, None)
    assert report.groups_made == tuple(replace(group, path=report.path) for group in made)


def test_ranks_that_still_load_torch_make_no_finding(script: str) -> None:
    here = set_up(script, "_new_process_group_helper", C10D, group_size="2", group_rank="0")
    verdict = seen({0: here, 1: busy(script, 1)}).verdict()
    assert all(finding.passing for finding in verdict.diagnosis.findings)


@pytest.mark.parametrize("output", [b"", b"{", b"[1, null]", b'[{"frames": 3}]', b'{"a": 1}'])
def test_what_py_spy_never_prints_is_no_stack(output: bytes) -> None:
    assert all(not thread.frames for thread in pyspy.parse(output, 1))


def test_what_py_spy_prints_is_read_with_its_variables() -> None:
    frame = {
        "name": "Trainer.fit",
        "filename": "a.py",
        "line": 3,
        "locals": [{"name": "n", "repr": "1"}],
    }
    row = {"os_thread_id": 7, "thread_name": "MainThread", "frames": [frame, {"line": None}]}
    (thread,) = pyspy.parse(json.dumps([row]).encode(), 7)
    assert thread == Thread("MainThread", True, (Frame("a.py", 3, "fit"),), ({"n": "1"},))
    (other,) = pyspy.parse(json.dumps([{**row, "os_thread_id": 8}]).encode(), 7)
    assert other == replace(thread, main=False)


def test_the_main_thread_of_a_process_in_another_container_is_known_by_its_number_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pyspy.processes, "in_its_container", lambda _pid: (7, "pid:[1]"))
    rows = [{"os_thread_id": number, "frames": []} for number in (7, 8)]

    assert [t.main for t in pyspy.parse(json.dumps(rows).encode(), 1007)] == [True, False]


def test_a_read_that_failed_as_the_process_ran_on_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [{"os_thread_id": 7, "frames": [{"name": "f", "filename": "a.py", "line": 3}]}]
    program = tmp_path / "py-spy"
    program.write_text(
        "#!/bin/sh\n"
        f"if mkdir {tmp_path}/once 2>/dev/null; then\n"
        "  printf 'Error: Failed to copy\\n\\nStack backtrace:\\n 1: main' >&2\n"
        f"else echo '{json.dumps(rows)}'; fi\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(pyspy, "command", lambda: str(program))
    stacks = pyspy.read([7])
    assert stacks.of[7][0].frames[0].line == 3 and not stacks.why_not
    program.write_text("#!/bin/sh\nprintf 'Error: Failed\\nStack backtrace:\\n 1: main' >&2\n")
    assert pyspy.read([7]).why_not == ("py-spy could not read process 7: Failed",)


def test_without_py_spy_a_line_says_what_would_give_the_stacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pyspy, "command", lambda: None)
    nothing = pyspy.read([1])
    assert not nothing.of and "pip install" in nothing.why_not[0]
    verdict = looked_at.look({0: Seen(1 << 30, 1, 0, 1, "train.py", 0.0)}).verdict()
    assert verdict.outcome is Outcome.UNDECIDED and verdict.unread == nothing.why_not


def test_a_rank_that_ends_while_jobs_are_listed_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its parent is asked for last, of the system: there is none any more."""
    pid, gone = os.getpid(), 1 << 30
    pids = enumerate((pid, gone))
    ranks = [Seen(each, 1, rank, 2, "train.py", 0.0, torch=True) for rank, each in pids]
    monkeypatch.setattr(looked_at, "_told", lambda: iter(ranks))
    (job,) = looked_at.jobs(frozenset())
    assert [each.pid for each in job.values()] == [pid]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_a_process_whose_name_is_no_text_is_looked_up_as_any_other() -> None:
    name, began = Path("/proc/self/comm"), job_folder.began(os.getpid())
    before = name.read_bytes()
    try:
        name.write_bytes(b"\xff) Z 1")
        assert job_folder.began(os.getpid()) == began
        assert parent(os.getpid()) == os.getppid()
        used = looked_at.used(os.getpid())
        assert used is not None and used.state == "R"
    finally:
        name.write_bytes(before)


def test_of_a_job_that_was_started_with_the_variable_it_is_not_advised(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks may not have imported torch yet, which takes long on a busy machine."""
    for threads in ({}, {0: backward(script), 1: backward(script)}):
        ranks = {rank: Seen(1 << 30, 1, rank, 2, "train.py", 1e11) for rank in (0, 1)}
        look = Look(threads, dict.fromkeys(ranks, Used("S", 1, {})))
        for was_set, advice in ((True, "then ask again"), (False, "started with DDP_NOTEBOOK=1")):
            monkeypatch.setattr(looked_at, "was_set", lambda _, was_set=was_set: was_set)
            unsure = looked_at.seen(ranks, look, look).verdict().diagnosis.unsure
            assert advice in unsure and ("More is known of" in unsure) is not was_set, unsure
