"""What prepared ranks leave: who may read it, what is kept, and what is no such thing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import jsonschema
import pytest
import torch
from support import eventually

from ddp_notebook import __main__
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import find, hosts, outside, prepared, records, target
from ddp_notebook.jobs.outside import Seen
from ddp_notebook.jobs.records import Process
from ddp_notebook.jobs.verdict import Outcome
from ddp_notebook.model import (
    Activity,
    Case,
    Collective,
    Collectives,
    Phase,
    Place,
    RankReport,
    Splits,
    codec,
)
from ddp_notebook.rank.collectives.splits import NotedExchanges
from ddp_notebook.rank.prepared import job_folder, processes
from ddp_notebook.rank.prepared.job_folder import About


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for prepared processes."""
    monkeypatch.setenv(job_folder.FOLDER_VARIABLE, str(tmp_path / "jobs"))
    return tmp_path / "jobs"


def about(rank: int = 0, pid: int = 2**22 + 1, wall_s: float = 1.0, parent: int = 7) -> About:
    """A process that is no more."""
    return About(
        pid, 5, parent, 3, rank, 2, 0, "/home/me/train.py", "/home/me", "here",
        job_folder.namespace(), wall_s,
    )  # fmt: skip


def test_a_process_is_found_again_with_its_rank_and_job() -> None:
    alive = dataclasses.replace(about(1), pid=os.getpid(), began=job_folder.began(os.getpid()))
    for each in (about(0), alive):
        assert job_folder.make(each) is not None

    (job,) = records.jobs()

    assert job.alive == (1,)
    assert find.job_of(os.getpid()).first == about(0)
    assert find.job_of(7) == job, "its launcher names it too"


def test_jobs_that_one_shell_started_one_after_the_other_are_told_apart() -> None:
    for number in range(2):
        job_folder.make(about(0, pid=2**22 + number, wall_s=float(number)))

    assert [len(job.processes) for job in records.jobs()] == [1, 1]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 1, 2), (0, 2, 1, 3)])
def test_jobs_that_one_shell_started_at_the_same_time_are_told_apart(
    order: tuple[int, ...],
) -> None:
    """By where their ranks meet; not where that makes no whole job: then one was told wrongly."""
    told = [(0, "1000"), (1, "1000"), (0, "2000"), (1, "2000")]
    ranks = [
        dataclasses.replace(
            about(told[at][0], pid=2**22 + at, wall_s=float(when)),
            told={"MASTER_ADDR": "here", "MASTER_PORT": told[at][1]},
        )
        for when, at in enumerate(order)
    ]

    jobs = job_folder.by_job(ranks)
    strayed = job_folder.by_job([ranks[order.index(0)], ranks[order.index(3)]])

    assert sorted(sorted(each.pid - 2**22 for each in of.values()) for of in jobs) == [
        [0, 1],
        [2, 3],
    ]
    assert [sorted(of) for of in strayed] == [[0, 1]]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_a_rank_that_starts_the_others_itself_is_in_their_job(order: tuple[int, ...]) -> None:
    """So does Lightning's own launcher: the script that the user starts is rank 0."""
    first = about(0, pid=2**22, parent=7)
    ranks = {0: first} | {
        rank: dataclasses.replace(
            about(rank, pid=2**22 + rank, parent=first.pid), parent_began=first.began
        )
        for rank in (1, 2)
    }
    ranks = {rank: dataclasses.replace(ranks[rank], world_size=3) for rank in ranks}

    jobs = job_folder.by_job(ranks[rank] for rank in order)

    assert [sorted(of) for of in jobs] == [[0, 1, 2]]


def test_what_a_job_of_one_rank_starts_is_a_job_of_its_own() -> None:
    alone = dataclasses.replace(about(0, pid=2**22), world_size=1)
    ranks = [
        dataclasses.replace(
            about(rank, pid=2**22 + 1 + rank, parent=alone.pid), parent_began=alone.began
        )
        for rank in range(2)
    ]

    jobs = job_folder.by_job([alone, *ranks])

    assert [sorted(of) for of in jobs] == [[0], [0, 1]]


def test_the_newest_jobs_are_kept() -> None:
    for number in range(job_folder.KEPT_JOBS + 3):
        job_folder.make(about(0, pid=2**22 + number, wall_s=float(number), parent=number))

    job_folder.sweep()

    assert [job.first.wall_s for job in records.jobs()] == [7.0, 6.0, 5.0, 4.0, 3.0]


def test_a_removal_that_is_interrupted_is_finished_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(job_folder.KEPT_JOBS + 1):
        own = job_folder.make(about(0, pid=2**22 + number, wall_s=float(number), parent=number))
        assert own is not None
        (own / "stacks.txt").touch()
    oldest = job_folder.processes()[0][1]

    with monkeypatch.context() as ended_here:
        ended_here.setattr(job_folder.shutil, "rmtree", lambda *_, **__: None)
        job_folder.sweep()
    assert oldest == job_folder.processes()[0][1]
    job_folder.sweep()

    assert not oldest.exists()


def test_a_job_that_runs_in_another_container_is_kept_and_not_said_to_have_ended() -> None:
    """Its pid means another process here, or none."""
    theirs = dataclasses.replace(about(0, wall_s=0.5), pids="pid:[1]")
    own = job_folder.make(theirs)
    assert own is not None
    with socket.socket(socket.AF_UNIX) as asked:
        asked.bind(str(own / "ask"))
        asked.listen()
        for number in range(job_folder.KEPT_JOBS + 1):
            job_folder.make(about(0, pid=2**22 + 7 + number, wall_s=1.0 + number, parent=number))

        job_folder.sweep()

        (row,) = (each for each in find.listed() if each.began_s == 0.5)
        assert (row.stuck, row.state) == (None, "runs in another container: ask there")
        theirs_here = hosts.named([str(theirs.pid)])
        assert theirs_here.about.endswith("it runs in another container: ask there")
        for ask in (theirs_here.why, theirs_here.where, theirs_here.places, theirs_here.board):
            with pytest.raises(
                UsageMistake, match=f"docker exec CONTAINER ddp-notebook why {theirs.pid}$"
            ):
                ask()
    job_folder.sweep()
    assert 0.5 not in [job.first.wall_s for job in records.jobs()]


def test_a_process_of_another_container_is_known_by_its_number_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = dataclasses.replace(about(0, pid=6, wall_s=2.0), pids="pid:[1]")
    mine = dataclasses.replace(about(0, pid=6, wall_s=1.0), parent=8)
    for each in (theirs, mine):
        assert job_folder.make(each, job_folder.root()) is not None
        (job_folder.root() / f"{each.pid}-{each.began}").rename(
            job_folder.root() / f"{each.pid}-{each.pids[-4:-1]}"
        )
    monkeypatch.setattr(processes, "in_its_container", lambda pid: (pid - 100, "pid:[1]"))

    assert find.job_of(106).first == theirs
    assert find.job_of(6).first == mine, "this container's numbers come first"
    assert records.pids() == {6}
    assert hosts.named(["106"]).name == "job 6 (train.py)"


def test_a_process_that_has_ended_and_was_not_waited_for_is_called_so() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        ended = f"Process {process.pid} has ended, and process {os.getpid()}"
        with pytest.raises(UsageMistake, match=ended):
            find.job_of(process.pid)


def test_a_folder_that_others_can_enter_is_neither_written_nor_read(root: Path) -> None:
    root.mkdir()
    root.chmod(0o755)

    assert job_folder.make(about()) is None
    assert records.jobs() == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 3}', '{"version": 2}', "null"])
def test_what_is_half_written_or_of_another_version_is_passed_over(root: Path, text: str) -> None:
    own = job_folder.make(about())
    assert own is not None
    (own / "about.json").write_text(text)

    assert records.jobs() == []


def test_a_number_that_no_process_can_have_is_not_shown_as_another() -> None:
    with pytest.raises(UsageMistake, match="There is no process 184467440737095516… here"):
        target.on_this_host([str(2**64)])


@pytest.mark.parametrize(
    ("pid", "why"),
    [
        (2**22 + 5, "There is no process"),
        (os.getpid(), "has not loaded torch: it is neither a rank"),
    ],
    ids=["no process", "this one"],
)
def test_a_pid_that_is_no_prepared_rank_is_told_why(
    pid: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "has_torch", lambda pid: False)
    monkeypatch.setattr(find, "untold", lambda pid: ())  # another test's fork server is one
    with pytest.raises(UsageMistake, match=why):
        find.job_of(pid)
    monkeypatch.setattr(find, "untold", lambda pid: (41, 42))
    if pid == os.getpid():
        with pytest.raises(UsageMistake, match="41, 42"):
            find.job_of(pid)


def test_stacks_that_a_signal_had_written_say_where_the_main_thread_was(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\n\n\ntime.sleep(3)\n")
    os.utime(script, (0, 0))
    folder = job_folder.make(about(0))
    assert folder is not None
    (folder / "stacks.txt").write_text(
        "main thread 0x00007f01\n"
        "Thread 0x00007f02 (most recent call first):\n"
        '  File "/home/me/loader.py", line 3 in run\n\n'
        "Current thread 0x00007f01 [MainThread] (most recent call first):\n"
        '  File "/usr/lib/python3.11/selectors.py", line 9 in select\n'
        f'  File "{script}", line 4 in <module>\n'
        "Extension modules: numpy, torch (total: 2)\n"
    )
    (job,) = records.jobs()

    report = prepared.case_of(job).ranks[0]

    assert [(p.file, p.line, p.text) for p in report.path] == [("train.py", 4, "time.sleep(3)")]
    assert report.doing == "it was ended from outside, by a signal; it was at train.py, line 4"


@pytest.mark.parametrize("text", ["", "main thread 0x1\n", "Thread 0x\n  File", "\x00" * 99])
def test_stacks_that_are_none_tell_nothing(text: str) -> None:
    folder = job_folder.make(about(0))
    assert folder is not None
    (folder / "stacks.txt").write_text(text)

    assert prepared.case_of(records.jobs()[0]).ranks[0].path == ()


def test_the_list_of_jobs_has_the_form_of_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(Path(find.__file__).with_name("schema_jobs.json").read_text())
    for number in (0, 1):
        job_folder.make(about(number, pid=2**22 + number))

    assert __main__.main(["jobs", "--json"]) == 0

    wire = json.loads(capsys.readouterr().out)
    jsonschema.validate(wire, schema)
    (job,) = (job for job in wire["jobs"] if job["prepared"])
    assert (job["stuck"], job["state"], job["alive"]) == (False, "has ended", [])
    assert __main__.main(["jobs"]) == 0
    assert re.search("train.py +0-1 of 2", capsys.readouterr().out)  # others' jobs are listed too


@pytest.mark.parametrize(("variable", "how"), [("0", "started without"), ("1", "or not yet")])
def test_ranks_that_were_not_prepared_are_listed_and_their_children_are_not(
    variable: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library of that name stands for torch, which takes seconds to load.

    With the variable set, nobody is told to set it.
    """
    (tmp_path / "libtorch.so").write_bytes(bytes(4096))
    script = tmp_path / "lonely_rank.py"
    script.write_text(
        "import mmap, subprocess, sys\n"
        "with open(sys.argv[1], 'rb') as file:\n"
        "    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "if len(sys.argv) < 3:\n"
        "    worker = subprocess.Popen([sys.executable, __file__, sys.argv[1], 'worker'])\n"
        "print('there', flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "DDP_NOTEBOOK": variable}
    command = [sys.executable, str(script), str(tmp_path / "libtorch.so")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None and process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"there\n"] * 2

        jobs = [each for each in find.listed() if each.script == str(script)]

        (job,) = jobs
        assert (job.pids, job.world_size, job.prepared) == ({1: process.pid}, 2, False)
        assert job.stuck is None
        assert abs(time.time() - job.began_s) < 120
        assert __main__.main(["jobs"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"ddp-notebook why {process.pid}" in shown
        assert how in hosts.named([str(process.pid)]).about
        if variable == "1":
            assert "Start one with DDP_NOTEBOOK=1" not in shown
        process.stdin.close()


def test_an_attached_job_is_followed_to_the_launchers_next_attempt_and_missed_when_gone() -> None:
    first = job_folder.make(about(0, pid=2**22 + 1, wall_s=1.0))
    by_launcher, by_rank = hosts.named(["7"]), hosts.named([str(2**22 + 1)])
    again = dataclasses.replace(about(0, pid=2**22 + 2, wall_s=2.0), attempt=1)
    job_folder.make(again)

    assert by_launcher.job.first.attempt == 1
    assert by_rank.job.first.attempt == 0
    assert first is not None
    shutil.rmtree(first)
    with pytest.raises(UsageMistake, match=r"The record of job 4194305 .* is gone"):
        by_rank.why()


def test_who_started_a_launcher_names_its_job_and_one_of_several_is_to_be_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_folder.make(about(0))
    job_folder.make(about(0, pid=2**22 + 2, parent=8))
    started = {os.getpid(): (7,)}
    for module in (outside, find):
        monkeypatch.setattr(module, "untold", lambda pid: started.get(pid, ()))

    assert hosts.named([str(os.getpid())]).name == "job 7 (train.py)"
    started[os.getpid()] = (7, 8)
    with pytest.raises(UsageMistake, match=r"several jobs\. Name one by its pid: 7, 8"):
        hosts.named([str(os.getpid())])


def test_without_the_variable_nothing_of_ours_is_loaded() -> None:
    code = (
        "import sys, time; import contextlib, os\n"
        "began = time.perf_counter()\n"
        "from ddp_notebook import autoload; autoload.load()\n"
        "ours = sorted(name for name in sys.modules if name.startswith('ddp_notebook'))\n"
        "assert ours == ['ddp_notebook', 'ddp_notebook.autoload'], ours"
    )
    environment = {k: v for k, v in os.environ.items() if k != "DDP_NOTEBOOK"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_an_error_of_ours_never_leaves_the_entry_point() -> None:
    """Here torch is not even imported, and cannot be."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from ddp_notebook import autoload; autoload.load()"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "DDP_NOTEBOOK": "1"}
    )


def written(rank: int, activity: Activity, stacks: str = "") -> None:
    """A rank that was ended from outside, when it had written what it did."""
    folder = job_folder.make(about(rank, pid=2**22 + rank))
    assert folder is not None
    report = RankReport(rank, activity, path=(Place("train.py", 9, "main"),))
    job_folder.write(folder / "report.json", {"counts": [0], "report": codec.encode(report)})
    (folder / "stacks.txt").write_text(stacks)


def test_a_rank_that_was_killed_while_it_was_busy_is_not_said_to_be_busy() -> None:
    for rank, activity in enumerate((Activity.WAITING, Activity.BUSY)):
        written(rank, activity)
    (job,) = records.jobs()

    first, second = (process.last_report(rank, False) for rank, process in job.processes.items())

    assert (first.activity, second.activity) == (Activity.WAITING, Activity.DEAD)
    assert [place.line for place in second.path] == [9]
    assert job.processes[0].last_report(0, True).activity is Activity.DEAD, "the others run"
    verdict = prepared.why(job)
    assert verdict.outcome is Outcome.UNDECIDED
    assert "rank 1 ended by a signal, a crash or os._exit()" in verdict.diagnosis.unsure


LOST = "[…/pair.cc:553] Connection closed by peer [127.0.0.1]:31377."
TRACE = """\
Current thread 0x1 (most recent call first):
  File "/a.py", line 3 in f
"""
ENDED_BY_SIGTERM = f"main thread 0x1\n{TRACE}"


def left(rank: int, error: str | None, steps: int) -> tuple[Collective, ...]:
    """A rank that ended by itself, after so many all_reduces; in the last came the error, if any.

    gloo's collectives are done even then.
    """
    folder = job_folder.make(about(rank, pid=2**22 + rank))
    assert folder is not None
    frames = [("/home/me/train.py", 9, "<module>", "dist.all_reduce(total)")]
    told = None if error is None else {"type": "RuntimeError", "text": error, "frames": frames}
    job_folder.write(folder / "end.json", {"error": told})
    path = (Place("train.py", 9, "", "dist.all_reduce(total)"),)
    return tuple(
        Collective(rank, n, "all_reduce", n, api="all_reduce", path=path, phase=Phase.DONE)
        for n in range(steps)
    )


@pytest.mark.parametrize("fewer", [0, 1])
def test_who_left_the_loop_early_is_named_though_the_others_lost_their_connections(
    fewer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it had called as many as they did, it is not known why they failed."""
    issued = {0: left(0, None, 3 - fewer), 1: left(1, LOST, 3)}
    monkeypatch.setattr(prepared, "collectives_of", lambda job: Collectives(issued))
    (job,) = records.jobs()

    diagnosis = prepared.why(job).diagnosis

    assert [(f.ranks, f.waiting) for f in diagnosis.findings] == [((0,), (1,))] * fewer
    assert diagnosis.doing[1].startswith("failed: RuntimeError")
    if not fewer:
        assert diagnosis.unsure == "Rank 1 failed, and the cause is not known."


@pytest.mark.parametrize("first_ended", [True, False], ids=["a rank had ended", "none had"])
def test_a_rank_that_the_launcher_ended_did_not_die_first(first_ended: bool) -> None:
    """The connections that others lost were those to a rank that ended; or nobody knows whose."""
    left(0, LOST, 0)
    if first_ended:
        left(1, None, 0)
    written(2, Activity.SILENT, ENDED_BY_SIGTERM)
    (job,) = records.jobs()

    verdict = prepared.why(job)

    assert verdict.outcome is Outcome.UNDECIDED, verdict
    assert "Rank 0 failed, and the cause is not known; rank" in verdict.diagnosis.unsure


def test_of_an_ended_job_nothing_is_said_to_wait_still() -> None:
    for rank in (0, 1):
        written(rank, Activity.WAITING)

    unsure = prepared.why(records.jobs()[0]).diagnosis.unsure

    assert unsure.startswith("Undecided: ranks 0 and 1 were ended from outside"), unsure
    assert "so far" not in unsure


def test_a_job_that_ends_while_it_is_looked_at_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rank in (0, 1):
        left(rank, None, 0)
    (job,) = records.jobs()
    alive = [True]
    monkeypatch.setattr(About, "alive", property(lambda about: alive[0]))
    looked_at = prepared.case_of

    def case_of(job: records.Job) -> Case:
        case = looked_at(job)
        alive[0] = False
        return case

    monkeypatch.setattr(prepared, "case_of", case_of)

    verdict = prepared.why(job)

    assert verdict.outcome is Outcome.NO_PROBLEM, verdict


def test_an_error_is_written_when_it_is_raised_and_not_only_when_python_ends(
    tmp_path: Path,
) -> None:
    """A launcher that sees another rank fail may end this one in between."""
    code = (
        "import atexit, os, pathlib\n"
        "from ddp_notebook.rank.prepared.ending import note_the_end\n"
        f"note_the_end(pathlib.Path({str(tmp_path)!r}))\n"
        "atexit.register(os._exit, 9)\n"
        "raise ValueError('no good')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert done.returncode == 9
    assert json.loads((tmp_path / "end.json").read_text())["error"]["text"] == "no good"


def test_a_folder_that_others_can_enter_is_named_as_the_reason_for_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv(job_folder.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(outside, "jobs", lambda prepared: [])
    with pytest.raises(UsageMistake, match="until it is a folder of yours of mode 0700"):
        target.on_this_host([])
    tmp_path.chmod(0o700)
    with pytest.raises(UsageMistake, match=f"FOLDER\\). {find.HOW_TO_PREPARE[:9]}"):
        target.on_this_host([])


EXITS = {
    "sys.exit('no key lr')": ("SystemExit", "no key lr"),
    "sys.exit(3)": ("SystemExit", "3"),
    "with open('/dev/null'):\n    sys.exit(3)": ("SystemExit", "3"),
    "try:\n    1 / 0\nexcept Exception:\n    sys.exit(1)": (
        "ZeroDivisionError",
        "division by zero",
    ),
    "sys.excepthook = lambda *error: print('a hook of my own')\n1 / 0": (
        "ZeroDivisionError",
        "division by zero",
    ),
    "sys.last_value = KeyError('shown at a prompt')": None,
    "sys.exit(0)": None,
    "sys.exit()": None,
    "try:\n    sys.exit(3)\nexcept SystemExit:\n    print()": None,
    "import threading\nt = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()": None,
}


def test_a_rank_that_leaves_with_an_exit_code_has_failed(tmp_path: Path) -> None:
    """Python tells no hook of it; and one that was caught, or ended a thread, is none."""
    started = []
    for number, code in enumerate(EXITS):
        folder = tmp_path / str(number)
        folder.mkdir()
        begin = (
            "import pathlib, sys\n"
            "from ddp_notebook.rank.prepared.ending import note_the_end\n"
            f"note_the_end(pathlib.Path({str(folder)!r}))\n"
        )
        with_code = [sys.executable, "-c", begin + code]
        started.append((folder, subprocess.Popen(with_code, stderr=subprocess.DEVNULL)))

    for (folder, process), wanted in zip(started, EXITS.values(), strict=True):
        process.wait()
        end = json.loads((folder / "end.json").read_text())
        error = end["error"]
        assert (error and (error["type"], error["text"])) == wanted, EXITS
        assert end["orphan"] is False


CHILDREN = """\
import multiprocessing, pathlib, sys
from ddp_notebook.rank.prepared.ending import note_the_end

def work(folder, code):
    note_the_end(folder)
    exec(code)

if __name__ == "__main__":
    method, *codes = sys.argv[1:]
    context = multiprocessing.get_context(method)
    here = pathlib.Path(__file__).parent
    of = [context.Process(target=work, args=(here / str(n), c)) for n, c in enumerate(codes)]
    for each in of:
        each.start()
    for each in of:
        each.join()
"""
CHILDS_ENDS = {
    "{}['lr']": ("KeyError", "'lr'"),
    "sys.exit(3)": ("SystemExit", "3"),
    "try:\n    1 / 0\nexcept Exception:\n    sys.exit(1)": (
        "ZeroDivisionError",
        "division by zero",
    ),
    "sys.exit(0)": None,
    "pass": None,
}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_ends_a_child_of_multiprocessing_is_known_though_it_is_caught_there(
    tmp_path: Path, method: str
) -> None:
    (tmp_path / "children.py").write_text(CHILDREN)
    folders = [tmp_path / str(number) for number in range(len(CHILDS_ENDS))]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, str(tmp_path / "children.py"), method, *CHILDS_ENDS]
    subprocess.run(command, stderr=subprocess.DEVNULL, check=True)

    ends = [
        json.loads((tmp_path / str(n) / "end.json").read_text()) for n in range(len(CHILDS_ENDS))
    ]
    errors = [end["error"] and (end["error"]["type"], end["error"]["text"]) for end in ends]
    assert errors == list(CHILDS_ENDS.values())


def test_a_rank_that_crashed_is_known_to_have_died_first_and_where() -> None:
    """What a process that it has forked dies of is not its own end."""
    folder = job_folder.make(about(1))
    assert folder is not None
    code = (
        "import os, pathlib, signal\n"
        "from ddp_notebook.rank.prepared.ending import write_stacks_when_ended\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "write_stacks_when_ended(folder)\n"
        "if child := os.fork():\n"
        "    os.waitpid(child, 0)\n"
        "    assert 'Fatal' not in (folder / 'stacks.txt').read_text()\n"
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGSEGV, b""), "as without us"
    written(0, Activity.BUSY, ENDED_BY_SIGTERM)

    (finding,) = prepared.why(records.jobs()[0]).diagnosis.findings

    assert (finding.category.value, finding.ranks) == ("rank-died", (1,))
    assert "SIGSEGV" in finding.cause


@pytest.mark.parametrize("signal_text", ["Aborted", "Fatal error"])
def test_a_rank_that_c_code_aborted_is_not_blamed_for_others_may_have_caused_it(
    signal_text: str,
) -> None:
    written(0, Activity.BUSY, f"main thread 0x1\nFatal Python error: {signal_text}\n" + TRACE)
    written(1, Activity.BUSY, ENDED_BY_SIGTERM)

    verdict = prepared.why(records.jobs()[0])

    assert verdict.outcome is Outcome.UNDECIDED, verdict
    assert "rank 0 ended by SIGABRT" in verdict.diagnosis.unsure


CUT_SHORT = '{"error": {"type": "Val'


@pytest.mark.parametrize(
    ("name", "text"),
    [("end.json", CUT_SHORT), ("end.json", '{"error": 5}'), ("end.json", ""), ("end.new", "")],
)
@pytest.mark.parametrize("activity", [Activity.BUSY, Activity.WAITING])
def test_of_a_rank_whose_record_of_its_end_is_damaged_it_is_said_that_the_end_is_not_known(
    name: str, text: str, activity: Activity
) -> None:
    """It may have ended by itself, with or without an error, while a signal is only one way."""
    left(0, None, 0)
    written(1, activity)
    (folder,) = (process.folder for rank, process in _processes().items() if rank)
    (folder / name).write_text(text)

    verdict = prepared.why(records.jobs()[0])

    assert verdict.outcome is Outcome.UNDECIDED, verdict
    unsure = verdict.diagnosis.unsure
    assert "rank 1 ended, and how is not known: end.json in its record is damaged" in unsure
    assert "signal" not in unsure and "signal" not in verdict.diagnosis.doing[1]
    assert "damaged" in verdict.diagnosis.doing[1], verdict.diagnosis.doing


def test_a_damaged_record_of_an_end_does_not_hide_the_signal_that_is_known() -> None:
    written(0, Activity.BUSY, ENDED_BY_SIGTERM)
    (_processes()[0].folder / "end.json").write_text(CUT_SHORT)
    unsure = prepared.why(records.jobs()[0]).diagnosis.unsure
    assert "rank 0 was ended from outside, by a signal" in unsure


def test_of_a_rank_of_an_ended_job_that_is_not_on_this_host_no_end_is_claimed() -> None:
    folder = job_folder.make(dataclasses.replace(about(0), world_size=2))
    assert folder is not None
    job_folder.write(folder / "end.json", {"error": None})
    unsure = prepared.why(records.jobs()[0]).diagnosis.unsure
    assert unsure == "No problem is seen; rank 1 left nothing on this host."


def _processes() -> Mapping[int, Process]:
    return records.jobs()[0].processes


def test_ranks_that_lost_the_process_that_had_started_them_did_not_end_well() -> None:
    for rank in (0, 1):
        folder = job_folder.make(about(rank, pid=2**22 + rank))
        assert folder is not None
        job_folder.write(folder / "end.json", {"error": None, "orphan": True})

    verdict = prepared.why(records.jobs()[0])

    assert verdict.outcome is Outcome.UNDECIDED, verdict
    assert "the process that had started it was gone" in verdict.diagnosis.unsure


def stranger(*, variable: str = "0") -> subprocess.Popen[bytes]:
    """A process of this user's that is no prepared rank."""
    environment = {**os.environ, "DDP_NOTEBOOK": variable}
    process = subprocess.Popen(["sleep", "60"], env=environment)
    eventually(Path(f"/proc/{process.pid}/environ").read_bytes)  # it is set last in exec
    return process


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_rank_that_became_another_user_is_said_to_answer_that_user_alone() -> None:
    with subprocess.Popen(["sleep", "60"], user=65534) as process:
        try:
            began = job_folder.began(process.pid)
            job_folder.make(dataclasses.replace(about(0, pid=process.pid), began=began))
            job_folder.make(about(1))
            (job,) = records.jobs()
            verdict = prepared.why(job)
        finally:
            process.kill()

    assert verdict.outcome is Outcome.UNDECIDED
    doing = f"process {process.pid} runs as user 65534, and answers no other user"
    assert doing in str(verdict.diagnosis.doing)
    assert "answers of" not in verdict.basis, "nothing answered"


def test_a_rank_that_was_stopped_is_not_waited_for() -> None:
    with stranger() as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            began = job_folder.began(process.pid)
            job_folder.make(dataclasses.replace(about(0, pid=process.pid), began=began))
            (job,) = records.jobs()

            assert prepared.sockets_of(job) == {}
            report = prepared.case_of(job).ranks[0]
        finally:
            process.kill()
    assert (report.doing, report.process.pid) == (f"process {process.pid} is stopped", process.pid)


def test_where_a_record_is_that_another_folder_hides_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stranger(variable="1") as process:
        try:
            monkeypatch.setenv(job_folder.FOLDER_VARIABLE, str(tmp_path / "another"))
            with pytest.raises(UsageMistake, match="ask with the same DDP_NOTEBOOK_FOLDER") as why:
                find.job_of(process.pid)
            monkeypatch.delenv(job_folder.FOLDER_VARIABLE)
            with pytest.raises(UsageMistake, match="was started with DDP_NOTEBOOK_FOLDER="):
                find.job_of(process.pid)
        finally:
            process.kill()
    assert str(tmp_path / "jobs") in str(why.value) and "another" in str(why.value)


@pytest.mark.parametrize(
    ("began_s", "wanted"), [(50.0, target.Prepared), (150.0, target.Unprepared)]
)
def test_without_a_name_it_is_the_job_that_began_last(
    began_s: float, wanted: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was not prepared, and still runs, is not the one that has just ended."""
    job_folder.make(about(0, wall_s=100.0))
    other = Seen(os.getpid(), os.getppid(), 0, 1, "other.py", began_s)
    monkeypatch.setattr(outside, "jobs", lambda prepared: [{0: other}])

    assert isinstance(hosts.named(()), wanted)


def test_a_process_that_torch_did_not_prepare_is_told_why_not() -> None:
    with stranger(variable="1") as process:
        try:
            with pytest.raises(
                UsageMistake, match=r"has DDP_NOTEBOOK=1 in .* -m ddp_notebook\.run"
            ):
                find.job_of(process.pid)
        finally:
            process.kill()


def test_what_a_process_brought_to_its_last_exchanges_outlives_it() -> None:
    """The others may be further: those in which the last one is are compared."""
    for rank, steps in ((0, 6), (1, 5)):
        folder = job_folder.make(about(rank, 2**22 + 1 + rank))
        assert folder is not None
        noted = NotedExchanges(folder / "splits", (0, 1), "world")
        for step in range(steps):
            rows = 3 + (rank == 1 and step == 4)
            args = (torch.empty(6, 2), torch.empty(rows + 3, 2), [3, 3], [rows, 3])
            noted.check(step, args, lists=False)
        noted.check(9, (), lists=False)
        assert noted.latest is not None and noted.latest.slot == steps - 1
    (job,) = records.jobs()
    assert [each.slot for each in job.processes[0].splits] == [2, 3, 4, 5]

    of = {report.rank: report.splits for report in prepared.case_of(job).ranks}

    assert of[0] == Splits("world", 4, (3, 3), (3, 3), widths=(2, 2))
    assert of[1] == Splits("world", 4, (4, 3), (3, 3), widths=(2, 2))


def test_splits_that_are_no_such_thing_are_passed_over() -> None:
    folder = job_folder.make(about(0))
    assert folder is not None
    (folder / "splits").write_bytes(b'[1, {"group": 3}' + bytes(100) + b"\xff" * (1 << 14))
    (job,) = records.jobs()
    assert job.processes[0].splits == ()


CRASHES = """
import faulthandler, os, signal, sys
from collections.abc import Mapping
from pathlib import Path
from ddp_notebook.rank.prepared import ending
ending.write_stacks_when_ended(Path(sys.argv[1]))
assert not faulthandler.is_enabled() and not faulthandler.disable()
ending.write_stacks_when_ended(Path(sys.argv[1]))
if sys.argv[2] == "users" and not faulthandler.is_enabled():
    faulthandler.enable()
assert faulthandler.is_enabled() is (sys.argv[2] == "users")
os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.parametrize("whose", ["ours", "users"])
def test_a_crash_is_on_stderr_where_the_program_wants_it_there(whose: str, tmp_path: Path) -> None:
    """As without us: a program that enables faulthandler where it is not enabled does so."""
    words = [sys.executable, "-c", CRASHES, str(tmp_path), whose]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == -signal.SIGSEGV, ended
    assert ("Segmentation fault" in ended.stderr) is (whose == "users"), ended.stderr
    left = (tmp_path / "stacks.txt").read_text()
    assert ("Segmentation fault" in left) is (whose == "ours"), left


def test_jobs_that_run_stand_first_in_the_list_and_a_page_gets_a_table() -> None:
    ended = find.Listed("old.py", 2, {0: 1, 1: 2}, (), 0.0, True, False, "has ended")
    runs = find.Listed("new<b>.py", 2, {0: 3, 1: 4}, (0, 1), 0.0, True, False, "runs")
    for listed in (find.text([ended, runs]), find.html([ended, runs])):
        assert listed.index("new") < listed.index("old.py")
    assert "<table" in listed and "new&lt;b&gt;.py" in listed
    running, folded = listed.split("<details><summary>1 job ended")
    assert "%ddp_attach 3<" in running and "%ddp_attach 1<" in folded, "a call to copy in each row"
