"""Jobs on other hosts, without any: what hosts answer is joined, and may be anything."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile import changed, changes, often
from hypothesis import given
from test_mutations_of_jobs import looked_at
from traces import BUSY, all_reduce, barrier, play

from ddp_notebook.archive import save
from ddp_notebook.archive.format import Observed, SavedRun
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import hosts, prepared, target
from ddp_notebook.jobs.hosts import Elsewhere, Host
from ddp_notebook.jobs.verdict import Verdict
from ddp_notebook.model import Activity, Case, Category, RankReport

AHEAD_NS = 5_000_000_000_000
"""By so much the other hosts' clocks are ahead of this one's, which began when they did not."""
HANGS = play({0: [all_reduce(3), barrier(5)], 1: [all_reduce(3), all_reduce(6)]})


def seen(case: Case, *ranks: int, ahead_ns: int = 0, is_prepared: bool = True) -> SavedRun:
    """What a host knows that runs only these ranks."""
    absent = (RankReport(e.rank) if e.rank not in ranks else e for e in case.ranks)
    of = {
        rank: tuple(
            replace(each, issued_ns=each.issued_ns + ahead_ns, done_ns=each.done_ns and ahead_ns)
            for each in records
        )
        for rank, records in case.collectives.of.items()
        if rank in ranks
    }
    collectives = replace(case.collectives, of=of)
    part = replace(case, ranks=tuple(absent), collectives=collectives)
    verdict = Verdict(prepared.by_rules(part, all_seen=False), "the answers")
    observed = Observed("job 7 (train.py)", "it runs", ranks=ranks, prepared=is_prepared)
    run = target.saved(part, verdict, False, observed)
    taken = replace(run.snapshot, taken_ns=time.monotonic_ns() + ahead_ns)
    return replace(run, snapshot=taken, wall_ns=time.time_ns())


def test_ranks_of_two_hosts_are_judged_together_and_by_one_clock() -> None:
    runs = {"a": seen(HANGS, 0, ahead_ns=AHEAD_NS), "b": seen(HANGS, 1, ahead_ns=-AHEAD_NS)}

    case = hosts.joined(runs)
    found = hosts.diagnosed(runs)

    assert [report.network.host for report in case.ranks] == ["a", "b"]
    times = [case.collectives.of[rank][-1].issued_ns for rank in (0, 1)]
    assert abs(times[0] - times[1]) < 10**9, "both hosts tell the time of day"
    assert [f.ranks for f in found.findings if not f.passing] != [], "they wait for each other"
    verdict = hosts.judged(found, runs)
    assert verdict.basis == "the answers, on a; the answers, on b"


def test_ranks_that_no_host_has_are_said_and_never_blamed() -> None:
    three = play({0: [barrier(5)], 1: [barrier(5)], 2: []}, {2: BUSY})
    runs = {"a": seen(three, 0), "b": seen(three, 1)}

    found = hosts.diagnosed(runs)

    assert not found.wrong
    assert found.unsure == "No problem found so far: rank 2 was not seen."


def test_of_hosts_seen_from_outside_each_ones_own_findings_stand() -> None:
    runs = {rank: seen(HANGS, n, is_prepared=False) for n, rank in enumerate("ab")}
    assert hosts.diagnosed(runs).unsure.startswith("Undecided: the job was not prepared")


# -- hosts that answer anything ----------------------------------------------------------------


def answering(tmp_path: Path, answers: Callable[[str], Any], *names: str) -> list[tuple[Host, str]]:
    """Hosts, played by programs of this one, each with what it answers to `save` and `where`."""
    pairs = []
    for name in names:
        for command in ("save", "where"):
            (tmp_path / f"{name}-{command}").write_text(f"a greeting\n{answers(command)}\n")
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nshift 4\nexec cat "{tmp_path}/{name}-$1"\n')
        program.chmod(0o700)
        pairs.append((Host(name, (str(program),), "true"), "7"))
    return pairs


RUN = json.loads(save.line(seen(HANGS, 0, 1)))
STACK = {"rank": 0, "doing": {"activity": "waiting"}, "frames": [{"file": "a", "line": 1}]}
PLACES = {"format": "ddp_notebook places", "version": 1, "ranks": {}, "stacks": [STACK]}


def test_a_host_is_asked_for_a_run_and_for_stacks(tmp_path: Path) -> None:
    frame = {"file": "train.py", "line": 3, "function": "main"}
    places = {**PLACES, "stacks": [{**STACK, "frames": [frame]}]}
    said = {"save": RUN, "where": places}
    target = Elsewhere(answering(tmp_path, lambda command: json.dumps(said[command]), "a"))

    assert (target.name, target.about, target.world_size) == ("job 7 (train.py) on a", "it runs", 2)
    assert [frame.line for frame in target.where().stack(0).frames] == [3]
    assert target.saved().observed == Observed(
        "job 7 (train.py) on a", "it runs", "the answers, on a", ranks=(0, 1)
    )
    looked_at(target)


@given(changes(RUN), changes(PLACES))
@often
def test_what_a_host_answers_is_read_or_refused_in_words(
    tmp_path: Path, run: list[tuple[Any, ...]], places: list[tuple[Any, ...]]
) -> None:
    said = {"save": changed(RUN, run), "where": changed(PLACES, places)}
    hosts = answering(tmp_path, lambda command: json.dumps(said[command]), "a", "b")
    try:
        looked_at(Elsewhere(hosts))
    except UsageMistake as mistake:
        assert "\x1b" not in str(mistake)


def test_a_host_that_is_silent_is_a_note_beside_what_the_others_say(tmp_path: Path) -> None:
    hosts = answering(tmp_path, lambda command: json.dumps(RUN), "a")
    hosts.append((Host("b", ("false",), "ssh b true"), "9"))

    verdict = Elsewhere(hosts).why()

    assert any("On b" in note for note in verdict.unread), verdict.unread


def test_another_version_there_is_a_note(tmp_path: Path) -> None:
    inner = {**RUN["ddp_notebook"], "versions": {"ddp_notebook": "9.9"}}
    run = {**RUN, "ddp_notebook": inner}
    hosts = answering(tmp_path, lambda command: json.dumps(run), "a")
    assert any("a has ddp_notebook 9.9, this host has" in e for e in Elsewhere(hosts).why().unread)


# -- Slurm ---------------------------------------------------------------------------------------

SLURM = {
    "squeue": """case "$2" in
      --jobs=12) echo "12 RUNNING n[1-2]";;
      --jobs=13_2) echo "15 RUNNING n1";;
      --jobs=14) echo "14 PENDING";;
      --jobs=16) echo "16 RUNNING n1"; echo "17 RUNNING n2";;
      *) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
    esac""",
    "scontrol": 'case "$3" in n1) echo n1;; *) echo n1; echo n2;; esac',
    "srun": """echo "$@" >>"$ASKED"; while [ "$1" != sh ]; do shift; done; shift 4
      test "$2" = slurm-job=15 -o "$2" = slurm-job=12 && cat "$ANSWER" """,
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs in place of Slurm's; the file in which they note how srun was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in SLURM.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o700)
    (tmp_path / "answer").write_text(json.dumps(RUN))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("ANSWER", str(tmp_path / "answer"))
    return tmp_path / "asked"


def test_a_job_of_slurms_is_asked_on_each_of_its_hosts_and_overlaps_it(slurm: Path) -> None:
    target = hosts.named([], slurm="12")
    assert target.name == "job 7 (train.py) on n1, job 7 (train.py) on n2"
    calls = slurm.read_text().splitlines()
    assert sorted(word for call in calls for word in call.split() if "nodelist" in word) == [
        "--nodelist=n1",
        "--nodelist=n2",
    ]
    assert all(call.startswith("--overlap ") and "--jobid=12 " in call for call in calls)
    one = hosts.named([], slurm="13_2")
    assert one.name == "job 7 (train.py) on n1", "by the number that its processes know"


@pytest.mark.parametrize(
    ("number", "why"),
    [
        ("14", "Slurm job 14 cannot be looked at: it does not run, but is pending."),
        ("16", "several jobs of this array run: name one"),
        ("99", "Invalid job id specified"),
        ("-x", "is not the number of a Slurm job"),
    ],
)
def test_jobs_of_slurms_that_cannot_be_looked_at_are_refused_in_words(
    slurm: Path, number: str, why: str
) -> None:
    with pytest.raises(UsageMistake) as raised:
        hosts.named([], slurm=number)
    assert why in str(raised.value)


def test_without_slurm_it_is_said_where_the_option_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageMistake, match="squeue is not installed here: use --slurm where"):
        hosts.named([], slurm="12")
    with pytest.raises(UsageMistake, match="Give --slurm or a job, not both"):
        hosts.named(["12"], slurm="12")


def test_a_healthy_job_of_which_one_host_is_seen_has_no_finding() -> None:
    waits = play({0: [all_reduce(3), barrier(5)], 1: [all_reduce(3)]}, {1: BUSY})
    run = seen(waits, 0)
    assert run.diagnosis is not None and not run.diagnosis.wrong
    assert run.case is not None and run.case.ranks[1].activity is Activity.SILENT
    assert Category.UNDECIDED not in {f.category for f in run.diagnosis.findings}
