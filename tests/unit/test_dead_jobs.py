"""Jobs that have ended, read from what they left: dumps, logs, and files that are neither."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ddp_notebook import __main__
from ddp_notebook.archive.format import Observed, decode_run, encode_run
from ddp_notebook.archive.save import write
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import dumps, left, target, verdict
from ddp_notebook.jobs.dumps import NotPlain
from ddp_notebook.jobs.frames import Sources
from ddp_notebook.jobs.target import Left
from ddp_notebook.jobs.verdict import Outcome, Verdict
from ddp_notebook.model import Activity, Case, Diagnosis, Phase, Place, RankError, RankReport, Stage
from ddp_notebook.views import board as board_view
from ddp_notebook.views.board_rows import board

TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
SCRIPT = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(3):
    dist.all_reduce(torch.ones(4))
if rank == 0:
    dist.barrier()
dist.all_reduce(torch.ones(8))
"""
Call = tuple[str, int, tuple[int, ...], bool]


def dump(script: Path, calls: Sequence[Call], backend: str = "gloo") -> dict[str, Any]:
    """What torch's flight recorder holds after these calls: operation, line, shape, done."""
    entries = [
        {
            "record_id": number,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "profiling_name": f"{backend}:{operation}",
            "input_sizes": [list(shape)],
            "input_dtypes": ["Float"],
            "output_sizes": [list(shape)],
            "state": "completed" if done and backend == "nccl" else "scheduled",
            "retired": done,
            "time_created_ns": 1_000 * number,
            "time_discovered_completed_ns": None,
            "frames": [
                {"name": operation, "filename": TORCH, "line": 3245},
                {"name": "<module>", "filename": str(script), "line": line},
            ],
        }
        for number, (operation, line, shape, done) in enumerate(calls)
    ]
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}},
        "entries": entries,
    }


STEPS: list[Call] = [("all_reduce", 5, (4,), True)] * 3
IN_BARRIER: list[Call] = [*STEPS, ("barrier", 7, (), False)]
IN_ALL_REDUCE: list[Call] = [*STEPS, ("all_reduce", 8, (8,), False)]


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    """Writes dumps of ranks into a folder, as pickles or as JSON."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    os.utime(script, (1, 1))
    folder = tmp_path / "left"
    folder.mkdir()

    def write(*calls: Sequence[Call], backend: str = "gloo", as_json: bool = False) -> Path:
        for rank, of_rank in enumerate(calls):
            wire = dump(script, of_rank, backend)
            if as_json:
                for entry in wire["entries"]:
                    del entry["frames"]
                (folder / f"trace_rank_{rank}.json").write_text(json.dumps(wire))
            else:
                data = pickle.dumps(wire, protocol=2)
                (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
        return folder

    return write


def raised(rank: int, line: int, error: str) -> str:
    """An error that nobody caught, as torch writes it."""
    lines = [
        "Traceback (most recent call last):",
        f'  File "/home/me/train.py", line {line}, in <module>',
        "    dist.all_reduce(torch.ones(8))",
        error,
    ]
    return "".join(f"[rank{rank}]: {each}\n" for each in lines)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_conditional_barrier_is_found_in_dumps_with_stacks(
    job: Callable[..., Path], backend: str
) -> None:
    folder = job(IN_BARRIER, IN_ALL_REDUCE, IN_ALL_REDUCE, backend=backend)

    found = Left([folder]).why()

    (finding,) = found.diagnosis.findings
    assert (finding.category.value, finding.ranks) == ("conditional-collective", (0,))
    assert finding.sides[0].place is not None and finding.sides[0].place.line == 7
    assert found.outcome is Outcome.FINDING
    assert found.basis == "flight-recorder dumps of ranks 0-2 (with stacks)"


def test_without_stacks_it_is_undecided_with_the_facts(job: Callable[..., Path]) -> None:
    found = Left([job(IN_BARRIER, IN_ALL_REDUCE, IN_ALL_REDUCE, as_json=True)]).why()

    (finding,) = found.diagnosis.findings
    assert (finding.category.value, finding.ranks) == ("undecided", ())
    assert any("barrier" in line for line in finding.evidence)
    assert found.outcome is Outcome.UNDECIDED


def test_a_rank_whose_dump_ends_earlier_is_not_said_to_lack_anything(
    job: Callable[..., Path],
) -> None:
    """A dump is of one moment: what was issued later is not in it."""
    found = Left([job(IN_ALL_REDUCE, STEPS[:1], IN_ALL_REDUCE)]).why()

    assert [finding.ranks for finding in found.diagnosis.findings] == [()]
    assert found.outcome is Outcome.UNDECIDED


def test_dumps_of_a_healthy_job_have_no_finding(job: Callable[..., Path]) -> None:
    found = Left([job(STEPS, STEPS[:2], STEPS)]).why()

    assert found.diagnosis.findings == ()
    assert found.outcome is Outcome.UNDECIDED, "how it went on is not known"
    assert "how the job went on is not in them" in found.diagnosis.headline


def test_who_raised_first_is_told_from_who_lost_its_connection(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(
        raised(0, 8, "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1")
        + raised(1, 5, "ValueError: no rows left")
    )

    (finding,) = Left([log]).why().diagnosis.findings

    assert (finding.category.value, finding.ranks) == ("exception-on-one-rank", (1,))
    assert "ValueError: no rows left at train.py, line 5" in finding.cause


def test_an_error_that_was_caught_and_logged_is_none(tmp_path: Path) -> None:
    text = raised(0, 5, "ValueError: retry").replace("[rank0]: ", "")
    (tmp_path / "rank_0.log").write_text(text + "step\n" * 20)

    found = Left([tmp_path]).why()

    assert found.diagnosis.findings == ()


def test_a_killed_rank_is_known_from_the_agents_summary(tmp_path: Path) -> None:
    (tmp_path / "agent.log").write_text(
        "W torch/elastic/api.py] Sending process 11 closing signal SIGTERM\n"
        "  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 11)  (SIGTERM)\n"
        "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 12)  (SIGKILL)\n"
    )

    (finding,) = Left([tmp_path]).why().diagnosis.findings

    assert (finding.category.value, finding.ranks) == ("rank-died", (1,))
    assert not finding.commands, "a magic cannot act on it"
    assert "%ddp" not in finding.remedy


def test_an_abort_blames_nobody_for_it_may_come_after_all_was_done(tmp_path: Path) -> None:
    """Or C++ code aborts for what another rank did: it lost a connection, or waited too long."""
    exits = "".join(
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : -6 (pid: 1{rank})  (SIGABRT)\n"
        for rank in (0, 1)
    )
    (tmp_path / "job.log").write_text(f"step 9\n[0] end\n[1] end\n{exits}")

    found = Left([tmp_path]).why()

    (finding,) = found.diagnosis.findings
    assert (finding.category.value, finding.ranks) == ("undecided", ())
    assert "Ranks 0 and 1 ended by SIGABRT" in finding.cause


def test_a_process_that_gloo_ended_for_what_another_sent_is_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "agent.log").write_text(
        "  rank      : 0 (local_rank: 0)\n  exitcode  : -6 (pid: 11)  (SIGABRT)\n"
    )
    (tmp_path / "rank_0.err").write_text(
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  op.preamble.length <= op.nbytes. 32 vs 20. Received data size doesn't match "
        "expected size.\n"
    )

    found = Left([tmp_path]).why()

    assert [f.category.value for f in found.diagnosis.findings] == ["undecided"]


def test_only_the_last_attempt_of_torchrun_counts(tmp_path: Path) -> None:
    for attempt, error in enumerate(("ValueError: first", "KeyError: 'second'")):
        folder = tmp_path / "none_x" / f"attempt_{attempt}" / "0"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(raised(0, 5, error))

    (finding,) = Left([tmp_path]).why().diagnosis.findings

    assert "second" in finding.cause


def test_nothing_in_a_log_reaches_the_terminal_as_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.log").write_text(raised(0, 5, "ValueError: \x1b]0;title\x07\x1b[31mred\x1b[0m"))

    assert __main__.main(["why", str(tmp_path)]) == 1

    assert "\x1b" not in capsys.readouterr().out


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.check_call, (["touch", "/tmp/evil"],)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(_Evil()),
        b"\x80\x02r\xff\xff\xff\x7f.",
        b"\x80\x02]q\x00",
        b"\x80\x02t.",
        b"\x80\x02}(]]u.",
        b"\x80",
        pickle.dumps({"a": [1, (2, 3)]}, 2)[:-3],
    ],
)
def test_a_pickle_of_more_than_plain_values_is_refused(data: bytes) -> None:
    with pytest.raises(NotPlain):
        dumps.unpickled(data)


def test_plain_pickles_are_read_as_python_reads_them() -> None:
    value = {"a": [1, -2, 1 << 40, 2.5, None, True, False], "b": ("x", [], {}), "é": {1: "y"}}
    for protocol in (2, 3, 4, 5):
        assert dumps.unpickled(pickle.dumps(value, protocol)) == value


def test_half_a_surrogate_pair_of_a_dump_reaches_no_page() -> None:
    wire = dump(Path("half \ud800.py"), [("all_reduce", 5, (4,), True)])
    wire["pg_config"]["0"]["desc"] = "\udfff"
    read = dumps.read(dumps.unpickled(pickle.dumps(wire)), 0, Sources())
    assert read.records[0].path[0].file == "half ?.py" and list(read.groups) == ["0 (?)"]


def amplified(value: Any, times: int) -> bytes:
    """A pickle of a dump whose one value is a list of a list ten times, of a list ten times, ..."""
    for _ in range(times):
        value = [value] * 10
    entry = {"profiling_name": value, "process_group": value, "frames": value}
    entry |= {"input_sizes": value, "input_dtypes": value, "record_id": value, "state": value}
    groups = {"0": {"desc": value, "ranks": value}}
    return pickle.dumps({"version": value, "pg_config": groups, "entries": [entry] * 3}, 4)


@pytest.mark.parametrize("value", ["gloo:all_reduce", 7, ["[0, 1]"]])
def test_a_dump_of_a_few_bytes_builds_no_gigabytes(tmp_path: Path, value: Any) -> None:
    (tmp_path / "trace_rank_0").write_bytes(amplified(value, 30))
    (tmp_path / "a.log").write_text(raised(0, 5, "ValueError: no"))
    tracemalloc.start()
    found = Left([tmp_path]).why()
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert found.diagnosis.findings[0].ranks == (0,)


def test_entries_that_share_one_long_stack_build_it_once(tmp_path: Path) -> None:
    wire = dump(tmp_path / "train.py", [("all_reduce", 5, (4,), True)])
    frames = [{"name": "f", "filename": "/home/me/train.py", "line": n} for n in range(200)]
    sizes = [[4, 4]] * 10_000
    (entry,) = wire["entries"]
    wire["entries"] = [{**entry, "frames": frames, "input_sizes": sizes} for _ in range(20_000)]
    data = pickle.dumps(wire)
    began_s = time.monotonic()
    read = dumps.read(dumps.parse(data), 0, Sources())
    assert time.monotonic() - began_s < 30, "10,000 sizes of each of 20,000 entries take minutes"
    assert len(read.records) == 20_000 and read.records[0].numel == 160_000
    assert len({id(record.path) for record in read.records}) == 1


def test_a_pickle_whose_key_would_be_hashed_for_years_is_refused() -> None:
    """A tuple that is twice in the next one, forty times; and a memo of gigabytes."""
    nested = b"\x80\x02X\x01\x00\x00\x00aq\x00" + b"".join(
        b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(40)
    )
    with pytest.raises(NotPlain, match="twice"):
        dumps.unpickled(b"\x80\x02}" + nested[2:] + b"K\x01s.")
    with pytest.raises(NotPlain):
        dumps.unpickled(b"\x80\x02]r\xff\xff\xff\x7f.")
    shared = ("0", "default_pg")
    assert dumps.unpickled(pickle.dumps([shared, shared])) == [shared, shared]


def test_links_to_where_one_may_not_look_do_not_hide_the_rest(tmp_path: Path) -> None:
    """As from a folder to which others may write."""
    (tmp_path / "good.log").write_text(raised(0, 5, "ValueError: no rows"))
    (tmp_path / "link.log").symlink_to("/proc/1/root/secret.log")
    (tmp_path / "linked").symlink_to("/proc/1/cwd")
    (tmp_path / "ring").symlink_to(tmp_path)
    found = Left([tmp_path]).why()
    assert [finding.ranks for finding in found.diagnosis.findings] == [(0,)]


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x02garbage", b'{"entries": 3}', b'{"version": "1", "pg_config": []', b"{}"],
)
def test_what_is_no_dump_is_said_to_be_none(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(content)

    assert __main__.main(["why", str(tmp_path)]) == 3

    assert "No files of a job found" in capsys.readouterr().err


def test_entries_of_another_form_are_left_out(job: Callable[..., Path]) -> None:
    folder = job(IN_BARRIER, IN_ALL_REDUCE, IN_ALL_REDUCE)
    wire = dumps.unpickled((folder / "nccl_trace_rank_2").read_bytes())
    wire["entries"] += [3, {}, {"profiling_name": 3, "process_group": 4}, {"frames": [[]]}]
    (folder / "nccl_trace_rank_2").write_bytes(pickle.dumps(wire, 2))

    assert Left([folder]).why().diagnosis.findings[0].ranks == (0,)


def test_a_script_that_was_changed_since_is_not_read(job: Callable[..., Path]) -> None:
    folder = job(IN_BARRIER, IN_ALL_REDUCE, IN_ALL_REDUCE)
    script = folder.parent / "train.py"
    os.utime(script, (2**32, 2**32))

    places = Left([folder]).places()

    assert [place.text for path in places.values() for place in path] == ["", "", ""]


def test_the_json_has_the_form_of_its_schema(
    job: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    schema = json.loads(Path(verdict.__file__).with_name("schema.json").read_text())
    folders = [str(job(IN_BARRIER, IN_ALL_REDUCE, IN_ALL_REDUCE))]

    codes = [__main__.main(["why", "--json", folder]) for folder in folders]

    assert codes == [1]
    jsonschema.validate(json.loads(capsys.readouterr().out), schema)
    schema = json.loads(Path(verdict.__file__).with_name("schema_where.json").read_text())
    assert __main__.main(["where", "--json", *folders]) == 0
    wire = json.loads(capsys.readouterr().out)
    jsonschema.validate(wire, schema)
    assert wire["ranks"]["0"][-1]["line"] == 7


def test_what_was_read_can_be_saved_in_one_file_and_read_again(
    job: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, saved = job(IN_BARRIER, IN_ALL_REDUCE, IN_ALL_REDUCE), tmp_path / "saved.json"

    assert __main__.main(["save", str(folder), str(saved)]) == 0
    assert __main__.main(["save", str(folder), str(saved)]) == 3

    assert "ddp-notebook save JOB" in capsys.readouterr().err
    assert saved.stat().st_mode & 0o777 == 0o600
    assert Left([saved]).why().diagnosis.findings[0].ranks == (0,)


def test_of_a_rank_of_a_saved_run_that_raised_it_is_said_where(tmp_path: Path) -> None:
    raised = RankError("ValueError", "no data", (Place("train.py", 3),))
    case = Case((RankReport(0, Activity.FAILED, error=raised), RankReport(1, Activity.IDLE)))
    run = target.saved(case, Verdict(Diagnosis(), ""), True, Observed("job 7"))
    write(tmp_path / "saved.json", run, force=False)
    assert Left([tmp_path / "saved.json"]).places() == {0: raised.at}


def test_wrong_usage_has_an_exit_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["why", "/does/not/exist"]) == 3
    with pytest.raises(SystemExit) as ended:
        __main__.main(["why", "--no-such-option"])
    assert ended.value.code == 3
    with pytest.raises(UsageMistake, match="does not exist"):
        Left([Path("/does/not/exist")]).why()
    assert "does not exist" in capsys.readouterr().err


def test_a_rank_that_has_ended_well_is_not_shown_as_dead_or_never_launched() -> None:
    case = Case(tuple(RankReport(rank, Activity.IDLE) for rank in (0, 1)))
    for over in (True, False):
        board = target.board(case, "job 7 (train.py): it has ended", None, over)
        text = board_view.text(board)
        assert "ended" in text.splitlines()[-1]
        for untrue in ("dead", "launched", "exited", "heard", "runs"):
            assert untrue not in text
        assert 'class="ddp-strip"' not in board_view.html(board)


def test_a_rank_of_a_job_of_others_that_waits_is_not_called_running() -> None:
    waits = RankReport(0, Activity.WAITING, "collective", "all_reduce", initialized=True)
    case = Case((waits, RankReport(1, Activity.BUSY, initialized=True)))
    assert [row.word for row in target.board(case, "job 7").rows] == ["waiting", "running"]


@pytest.mark.parametrize("activity", list(Activity))
def test_of_a_job_of_others_no_stage_of_set_up_is_claimed(activity: Activity) -> None:
    case = Case((RankReport(0, activity, initialized=True),))
    shown = target.board(case, "job 7 (train.py)")
    assert f"/{len(Stage)}" not in board_view.text(shown) and "stage" not in board_view.text(shown)
    assert 'class="ddp-strip"' not in board_view.html(shown)
    run = target.saved(case, Verdict(Diagnosis(), ""), False, Observed("job 7"))
    again = board(decode_run(encode_run(run)).snapshot)
    assert all(row.stages_passed == len(Stage) for row in again.rows)
    assert "stage" not in board_view.text(again)


# -- plain logs ------------------------------------------------------------------------------

TRAINS = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    dist.barrier()
for batch in data:
    net(batch).backward()
dist.all_reduce(total)
"""
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def lost(rank: int, script: Path, line: int, call: str, text: str) -> str:
    """What torch prints of a rank that waited in a call of torch's until it failed."""
    return "".join(
        f"[rank{rank}]: {row}\n"
        for row in (
            "Traceback (most recent call last):",
            f'  File "{script}", line {line}, in <module>',
            f"    {TRAINS.splitlines()[line - 1].strip()}",
            f'  File "{TORCH.replace("distributed_c10d", "c10d_logger")}", line 83, in wrapper',
            "    return func(*args, **kwargs)",
            f'  File "{TORCH}", line 3252, in {call}',
            "    work.wait()",
            text,
        )
    )


def summary(*ends: tuple[int, int]) -> str:
    """torchrun's last words: ranks and their exit codes."""
    return "".join(
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {50 + rank})\n"
        for rank, code in ends
    )


@pytest.fixture
def trains(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    os.utime(script, (1, 1))
    return script


def test_ranks_that_gave_up_in_different_calls_are_told_apart_by_the_code(trains: Path) -> None:
    log = trains.parent / "job.log"
    closed = lost(1, trains, 8, "all_reduce", CLOSED)
    log.write_text(lost(0, trains, 5, "barrier", "RuntimeError: Timed out waiting 9ms") + closed)

    verdict = Left([log]).why()

    (finding,) = verdict.diagnosis.findings
    assert (finding.category.value, finding.ranks) == ("conditional-collective", (0,))
    assert "if rank == 0" in finding.remedy and "logs of ranks 0 and 1" in verdict.basis
    # gloo's dumps have no sends and receives: one without a record says nothing.
    dumps = trains.parent / "dumps"
    dumps.mkdir()
    of_two = {"pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}}
    for rank in (0, 1):
        (dumps / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(trains, []) | of_two))
    assert Left([log, dumps]).why().diagnosis.findings[0].cause == finding.cause

    same = trains.parent / "same.log"
    same.write_text(lost(0, trains, 8, "all_reduce", CLOSED) + closed)
    assert Left([same]).why().outcome is Outcome.UNDECIDED


def test_a_rank_that_ended_well_before_all_others_lost_it_is_named(trains: Path) -> None:
    """A rank that torchrun does not list among those that failed has ended well."""
    log = trains.parent / "job.log"
    both = lost(0, trains, 8, "all_reduce", CLOSED) + lost(2, trains, 8, "all_reduce", CLOSED)
    log.write_text(both + summary((2, -15), (0, 1)))

    (finding,) = Left([log]).why().diagnosis.findings

    assert (finding.category.value, finding.ranks) == ("early-exit", (1,))
    assert finding.waiting == (0, 2) and "train.py, line 8" in finding.evidence[0]

    # Of two that ended it is not known which one left the others alone.
    log.write_text(lost(2, trains, 8, "all_reduce", CLOSED) + summary((2, 1)))
    assert Left([log]).why().outcome is Outcome.UNDECIDED


def test_the_collective_that_raised_an_error_is_not_said_to_be_done(trains: Path) -> None:
    """gloo's dumps say so."""
    dumps = trains.parent / "dumps"
    dumps.mkdir()
    for rank, line in ((0, 5), (1, 8)):
        data = pickle.dumps(dump(trains, [("all_reduce", line, (8,), True)]))
        (dumps / f"nccl_trace_rank_{rank}").write_bytes(data)
    (dumps / "job.log").write_text(lost(1, trains, 8, "all_reduce", CLOSED))

    of = left.gather([dumps]).case.collectives.of

    assert [of[rank][-1].phase for rank in (0, 1)] == [Phase.DONE, Phase.FAILED]


def test_a_rank_that_ended_before_a_collective_of_one_branch_did_not_miss_it(
    job: Callable[..., Path],
) -> None:
    """Its dump does not show what it called later, and it ended well: the condition tells."""
    folder = job(IN_BARRIER, STEPS, STEPS)
    (folder / "job.log").write_text("[rank1]: done\n[rank2]: done\n" + summary((0, -15)))

    (finding,) = Left([folder]).why().diagnosis.findings

    assert (finding.category.value, finding.ranks) == ("conditional-collective", (0,))


def test_a_rank_that_ended_while_others_waited_in_set_up_is_missing(tmp_path: Path) -> None:
    error = "DistStoreError: Timed out after 6 seconds waiting for clients. 1/2 clients joined."
    (tmp_path / "job.log").write_text(raised(0, 2, error) + summary((0, 1)))
    (tmp_path / "rank_1.log").write_text("done\n")

    (finding,) = Left([tmp_path]).why().diagnosis.findings

    assert (finding.category.value, finding.ranks) == ("missing-rank", (1,))
    assert finding.waiting == (0,)


def test_an_error_without_its_rank_is_the_failed_ranks(tmp_path: Path) -> None:
    log = tmp_path / "slurm-7.out"
    error = raised(0, 2, "OSError: [Errno 98] Address already in use").replace("[rank0]: ", "")
    log.write_text(error + summary((1, -15), (0, 1)))

    (finding,) = Left([log]).why().diagnosis.findings

    assert (finding.category.value, finding.ranks) == ("port-in-use", (0,))


def test_whose_error_it_was_is_not_guessed(tmp_path: Path) -> None:
    errors = raised(0, 2, "ValueError: a") + raised(0, 3, "KeyError: 'b'")
    log = tmp_path / "job.log"
    log.write_text(errors.replace("[rank0]: ", "") + summary((0, 1), (1, 1)))

    verdict = Left([log]).why()

    assert verdict.outcome is Outcome.UNDECIDED
    assert not [f for f in verdict.diagnosis.findings if f.ranks]


UNREADABLE = """\
  File "/home/me/train.py", line 3
    if rank == 0
                ^
SyntaxError: expected ':'
"""
REFUSED = """\
usage: train.py [-h] --lr LR
train.py: error: the following arguments are required: --lr
"""


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (UNREADABLE, "raised SyntaxError: expected ':' at train.py, line 3"),
        (REFUSED, "raised SystemExit: train.py: error: the following arguments are required"),
    ],
    ids=["not compiled", "arguments refused"],
)
def test_what_kept_a_script_from_running_has_no_traceback(
    tmp_path: Path, written: str, words: str
) -> None:
    log = tmp_path / "job.log"
    log.write_text(written * 2 + summary((0, 1), (1, 1)))

    (finding,) = Left([log]).why().diagnosis.findings

    assert finding.ranks == (0, 1) and words in finding.cause
    # A folder of torchrun's has a file for each rank, and no word of the agent.
    for rank in (0, 1):
        file = tmp_path / "logs" / "attempt_0" / str(rank) / "stderr.log"
        file.parent.mkdir(parents=True)
        file.write_text(written)
    (finding,) = Left([tmp_path / "logs"]).why().diagnosis.findings
    assert finding.ranks == (0, 1) and words in finding.cause


def test_an_imported_file_that_cannot_be_compiled_has_one_error(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    begin = '  File "/home/me/train.py", line 1, in <module>\n    import broken\n'
    error = f"Traceback (most recent call last):\n{begin}{UNREADABLE}"
    log.write_text(error * 2 + summary((0, 1), (1, 1)))

    (finding,) = Left([log]).why().diagnosis.findings

    assert finding.ranks == (0, 1) and "raised SyntaxError: expected ':'" in finding.cause


def test_a_time_out_in_set_up_names_nobody_dead(tmp_path: Path) -> None:
    error = raised(0, 2, "DistStoreError: wait timeout after 6000ms, keys: /default_pg/0//cpu//0/2")
    log = tmp_path / "job.log"
    log.write_text(error.replace("[rank0]: ", "") * 2 + summary((0, -15), (1, 1)))

    assert [f.category.value for f in Left([log]).why().diagnosis.findings] == ["undecided"]


def test_how_a_process_ends_that_the_launcher_ends_is_not_its_own_doing(tmp_path: Path) -> None:
    (tmp_path / "agent.log").write_text(
        "W torch/elastic/api.py] Sending process 50 closing signal SIGTERM\n"
        + summary((0, -6), (1, -9))
    )

    (finding,) = Left([tmp_path]).why().diagnosis.findings

    assert (finding.category.value, finding.ranks) == ("rank-died", (1,))


MARKS = {
    "torchrun --tee": "[default{}]:{}",
    "torchrun --tee, as torch marks it": "[default{0}]:[rank{0}]: {1}",
    "another role": "[trainer{0}]:[rank{0}]: {1}",
    "kubectl --timestamps": "2026-05-01T12:00:00.123456789Z [rank{}]: {}",
    "kubectl --prefix": "[pod/train-worker-0/pytorch] [rank{}]: {}",
    "docker compose": "worker-1  | [rank{}]: {}",
    "journal": "May  1 12:00:00 node7 torchrun[4242]: [rank{}]: {}",
    "Ray": "\x1b[36m(TrainWorker pid=42, ip=10.0.0.1)\x1b[0m [rank{}]: {}",
    "a time and docker compose": "2026-05-01 12:00:00,1 worker-1 | [rank{}]: {}",
    "Windows line ends": "[rank{}]: {}\r",
}


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
def test_marks_of_torch_and_torchrun_say_which_rank_wrote_a_line_whatever_stands_before(
    tmp_path: Path, mark: str
) -> None:
    log = tmp_path / "job.log"
    written = [
        (rank, line.removeprefix(f"[rank{rank}]: "))
        for rank, text in (
            (0, raised(0, 8, CLOSED)),
            (1, raised(1, 5, "ValueError: no rows left")),
        )
        for line in text.splitlines()
    ]
    log.write_text("".join(mark.format(*line) + "\n" for line in written), newline="")

    (finding,) = Left([log]).why().diagnosis.findings

    assert (finding.category.value, finding.ranks) == ("exception-on-one-rank", (1,))


def test_the_number_of_a_host_or_of_a_place_on_it_is_no_rank(tmp_path: Path) -> None:
    """srun or mpirun that start torchrun on each host; torchrun's own mark counts on each host."""
    log = tmp_path / "slurm-7.out"
    text = raised(5, 5, "ValueError: no rows left") + summary((5, 1)).replace(
        "local_rank: 5", "local_rank: 1"
    )
    marked = text.replace("[rank5]: ", "[default1]:")
    for line_mark, written in (("1: ", text), ("[1,1]<stderr>:", text), ("", marked)):
        log.write_text("".join(f"{line_mark}{line}\n" for line in written.splitlines()))

        (finding,) = Left([log]).why().diagnosis.findings

        assert finding.ranks == (5,), line_mark


def test_a_folder_that_is_no_jobs_is_not_walked_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left, "MOST_IN_FOLDERS", 3)
    for number in range(4):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(UsageMistake, match="holds more than 3 files and folders"):
        left.found_in([tmp_path])


def test_what_is_no_pickle_is_refused_in_words() -> None:
    """As one, `h` gets what an earlier opcode has put away, and none has."""
    with pytest.raises(NotPlain, match="it is not a complete pickle"):
        dumps.unpickled(b"hi\n")
