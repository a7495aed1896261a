"""Ranks that nobody of ours started, prepared by a variable: asked while they run, read after."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prepared_ranks import found_in, goes_on, in_its_loop, launch, said
from support import eventually

from ddp_notebook import __main__
from ddp_notebook.cluster.questions import ask
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import find, prepared, records
from ddp_notebook.jobs.verdict import Outcome
from ddp_notebook.rank import calls


def test_a_launcher_that_waits_for_its_other_node_is_told(
    started: list[subprocess.Popen],
) -> None:
    words = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *words, "0", "train.py"]
    started.append(subprocess.Popen(torchrun, stderr=subprocess.DEVNULL))

    with pytest.raises(UsageMistake, match="is torchrun and has started no rank yet"):
        find.job_of(started[-1].pid)


def test_two_processes_that_are_the_same_rank_are_told(
    tmp_path: Path, started: list[subprocess.Popen]
) -> None:
    """One of them fails at the port, which the other one holds: a free port would not help."""
    pair = launch(tmp_path, started, numbers=(0, 0))
    eventually(lambda: any(each.poll() is not None for each in pair), 60, "a failure")
    runs = next(each for each in pair if each.poll() is None)

    for pid in (each.pid for each in pair):
        (finding,) = found_in(pid).diagnosis.findings
        assert (finding.category.value, finding.ranks) == ("duplicate-rank", (0,))
        assert str(runs.pid) in finding.cause


def test_a_job_that_hangs_is_judged_while_it_runs_and_after(
    tmp_path: Path,
    started: list[subprocess.Popen],
    shell: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = launch(tmp_path, started, "hang")

    verdict = found_in(ranks[0].pid)

    (finding,) = (each for each in verdict.diagnosis.findings if not each.passing)
    assert (finding.category.value, finding.ranks) == ("conditional-collective", (0,))
    place = finding.sides[0].place
    assert place is not None and (place.file, place.line) == ("train.py", 17)
    assert verdict.basis.startswith("the answers of ranks 0 and 1")
    job = find.job_of(ranks[1].pid)
    for process in job.processes.values():
        assert process.folder.stat().st_mode & 0o777 == 0o700
        assert (process.folder / "ask").stat().st_mode & 0o777 == 0o600
        written = process.folder / "report.json"
        until = time.monotonic() + 30
        while not written.exists() and time.monotonic() < until:
            time.sleep(0.1)
    # From a notebook, without a session.
    pid = ranks[0].pid
    assert f"{pid}  train.py" in (listed := said(shell, capsys, "%ddp_attach"))
    assert "conditional-collective: rank 0" in listed
    assert f"Attached to job {pid} (train.py): ranks 0 and 1 of 2; it runs." in said(
        shell, capsys, f"%ddp_attach {pid}"
    )
    shown = said(shell, capsys, "%ddp_why")
    assert shown.startswith(
        f"Of job {pid} (train.py): ranks 0 and 1 of 2; it runs. This stands on: "
    )
    assert "train.py, line 17" in shown
    wire = json.loads(said(shell, capsys, "%ddp_why --json"))
    assert wire["job"] == f"job {pid} (train.py)" == next(iter(wire.values()))
    assert wire["verdict"] == "finding"
    shown = said(shell, capsys, "%ddp_where --ranks 0 --locals")
    assert shown.startswith(f"Of job {pid} (train.py)")
    assert "waiting in barrier (torch.distributed)" in shown and "train.py, line 17" in shown
    assert "optimizer = " in shown
    shown = said(shell, capsys, "%ddp_board")
    assert f"job {pid} (train.py): ranks 0 and 1 of 2; it runs" in shown
    assert shown.count("  waiting  ") == 2 and "/6" not in shown
    saved = tmp_path / "saved.json"
    assert __main__.main(["save", str(pid), str(saved)]) == 0
    asked = ask({0: job.processes[0].folder / "ask"}, calls.FREE, calls.Nothing(), 2.0)
    assert isinstance(asked[0], calls.CannotAnswer), "who asks cannot change what it does"
    assert all(rank.poll() is None for rank in ranks), "asking changes nothing"

    for process in job.processes.values():
        (process.folder / "report.json").unlink()
    for rank in ranks:
        rank.terminate()
    assert [rank.wait() for rank in ranks] == [-signal.SIGTERM] * 2, "as without us"
    shown = said(shell, capsys, "%ddp_where")
    assert shown.startswith(f"Of job {pid} (train.py): ranks 0 and 1 of 2; it has ended.")
    assert (
        "rank 0  dead: it was ended from outside, by a signal; it was at train.py, line 17" in shown
    )
    assert "train.py, line 19" in shown
    assert "it has ended" in said(shell, capsys, "%ddp_board")
    said(shell, capsys, "%ddp_detach")
    assert "train.py, line 17" in said(shell, capsys, f"%ddp_attach {saved}\n%ddp_why")


def test_a_healthy_job_computes_the_same_and_has_no_finding(
    tmp_path: Path, started: list[subprocess.Popen]
) -> None:
    plain = launch(tmp_path, started, variable="0")
    without = [rank.communicate(timeout=120) for rank in plain]
    assert records.jobs() == [], "without the variable nothing is written"
    # What answers is loaded though nobody asks, and the main thread never pauses.
    # It calls init_process_group through init_device_mesh.
    ranks = launch(tmp_path, started, "busy", "mesh")

    outputs = [rank.communicate(timeout=120) for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert [out for out, _ in outputs] == [out for out, _ in without]
    assert [error for _, error in outputs] == [error for _, error in without]
    (job,) = records.jobs()
    verdict = prepared.why(job)
    assert verdict.outcome is Outcome.NO_PROBLEM, verdict


@pytest.mark.parametrize("torch_calls_entry_points", ["0", "1"])
def test_a_script_can_be_run_prepared_whether_or_not_torch_calls_entry_points(
    torch_calls_entry_points: str,
    tmp_path: Path,
    started: list[subprocess.Popen],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is killed: then there is no end, but what it did when it had long waited."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", torch_calls_entry_points)
    ranks = launch(tmp_path, started, "hang", variable="0", by=("-m", "ddp_notebook.run"))

    verdict = found_in(ranks[0].pid)

    assert [f.category.value for f in verdict.diagnosis.findings] == ["conditional-collective"]
    job = find.job_of(ranks[0].pid)
    assert job.first.script == str(tmp_path / "train.py")
    for process in job.processes.values():
        eventually((process.folder / "report.json").exists, 30)
    for rank in ranks:
        rank.kill()
        rank.wait()
    verdict = prepared.why(records.jobs()[0])
    assert verdict.diagnosis.findings[0].category.value == "conditional-collective"
    assert verdict.basis.startswith("what ranks 0 and 1 left")


def test_who_asks_a_job_cannot_change_what_it_does_or_have_it_evaluate(
    tmp_path: Path, started: list[subprocess.Popen]
) -> None:
    ranks = launch(tmp_path, started, "steps")
    job = eventually(lambda: in_its_loop(ranks[0].pid), 120)
    sockets = prepared.sockets_of(job)
    everything = {each.name: each for each in vars(calls).values() if type(each) is calls.Question}
    reads = {calls.REPORT.name, calls.REACH.name, calls.STACK.name, calls.RUN_FACTS.name}
    assert reads < everything.keys()
    given = {
        calls.EVALUATE.name: calls.Expression("__import__('os')._exit(3)"),
        calls.SET_BREAKPOINTS.name: calls.Breakpoints(
            (calls.Breakpoint(1, function="report", condition="__import__('os')._exit(3)"),)
        ),
        calls.MOVE.name: calls.Move(calls.How.END),
        calls.REACH.name: calls.Targets(()),
    }

    for name, question in everything.items():
        answers = ask(sockets, question, given.get(name, calls.Nothing()), 10.0)
        refused = [isinstance(answer, calls.CannotAnswer) for answer in answers.values()]
        assert refused == [name not in reads] * 2, (name, answers)
    assert goes_on(job)


def test_verbs_that_act_mean_the_sessions_ranks_while_a_job_is_attached(
    tmp_path: Path,
    started: list[subprocess.Popen],
    shell: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = launch(tmp_path, started, "steps")
    pid = ranks[0].pid
    job = eventually(lambda: in_its_loop(pid), 120)
    said(shell, capsys, f"%ddp_attach {pid}")
    for call in ("%ddp_abort", "%ddp_step", "%ddp_break 3", "%ddp_print rank"):
        assert not shell.run_cell(call).success
        assert f"look at job {pid} (train.py), which is attached" in capsys.readouterr().err
    said(shell, capsys, "%ddp_init -n 1 --device cpu")
    whose = f"the session's own ranks: job {pid} (train.py) is only looked at\n"
    assert whose in said(shell, capsys, "%ddp_abort")
    assert whose in said(shell, capsys, "value = %ddp_print 1 + 1")
    assert whose not in said(shell, capsys, "%ddp_why") + said(shell, capsys, "%ddp_step -h")
    assert goes_on(job)
    said(shell, capsys, "%ddp_detach")
    assert whose not in said(shell, capsys, "%ddp_abort")
