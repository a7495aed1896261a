"""Logs of ranks that never met: where they looked for each other, as torch and gloo write it."""

from __future__ import annotations

from pathlib import Path

import pytest
from collective_cases import diagnosed_log

from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import dead

INIT = 'dist.init_process_group("gloo", init_method=f"file://{PATH}", rank=RANK)'


def traceback(text: str, error: str) -> str:
    where = '  File "train.py", line 3, in <module>'
    return f"Traceback (most recent call last):\n{where}\n    {text}\n{error}\n"


def refused(rank: int, size: int, port: int, last: bool = True) -> str:
    return (
        "[/gloo/transport/tcp/debug_logger.cc:9] ERROR failed to connect, "
        f"willRetry={int(not last)}, retry=4, retryLimit=3, rank={rank}, size={size}, "
        f"local=[10.0.0.1]:4{rank}, remote=[10.0.0.1]:{port}$0, "
        "error=SO_ERROR: Connection refused, "
        f"remote=[10.0.0.1]:{port}$0\n"
    )


def gloo(port: int) -> str:
    return (
        "RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: "
        f"SO_ERROR: Connection refused, remote=[10.0.0.1]:{port}$0"
    )


def unanswered(port: int) -> str:
    return (
        "[E1123 11:08:23.6 socket.cpp:1028] [c10d] The client socket has timed out after 12000ms "
        f"while trying to connect to (10.0.0.1, {port}).\n"
    )


def waited(port: int) -> str:
    return (
        "[W1123 11:08:25.2 socket.cpp:494] [c10d] waitForInput: socket SocketImpl(fd=3, "
        f"addr=[::ffff:10.0.0.1]:54620, remote=[::ffff:10.0.0.1]:{port}) timed out after 12000ms\n"
    )


KEYS = "torch.distributed.DistStoreError: wait timeout after 12000ms, keys: /default_pg/0//cpu//0/1"


def summary(*codes: int) -> str:
    """What torchrun says of its ranks; it has closed those that SIGTERM ended."""
    closed = "".join(
        f"W api.py] Sending process {50 + rank} closing signal SIGTERM\n"
        for rank, code in enumerate(codes)
        if code == -15
    )
    rows = (
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {50 + rank})\n"
        for rank, code in enumerate(codes)
    )
    return closed + "".join(rows)


def told(folder: Path, text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(f.category.value, f.ranks) for f in diagnosed_log(folder, text).findings]


def test_addresses_in_a_stores_file_at_which_nobody_listens_are_of_an_earlier_run(
    tmp_path: Path,
) -> None:
    lines = refused(0, 2, 18332) + refused(1, 2, 55197)
    errors = traceback(INIT, gloo(18332)) + traceback(INIT, gloo(55197))
    assert told(tmp_path, lines + errors + summary(1, 1)) == [("stale-store", (0, 1))]
    # One of them did not give up, the world is larger, or it was no file: something else it is.
    for less in (
        refused(0, 2, 18332) + refused(1, 2, 1, last=False),
        lines.replace("size=2", "size=3"),
    ):
        assert told(tmp_path, less + errors + summary(1, 1)) == [("undecided", ())]
    by_tcp = errors.replace("file://", "tcp://")
    assert told(tmp_path, lines + by_tcp + summary(1, 1)) == [("undecided", ())]


def test_ranks_that_looked_for_the_store_at_ports_of_their_own_are_named(tmp_path: Path) -> None:
    waits = waited(29500) + traceback("dist.init_process_group()", KEYS)
    two = unanswered(4001) + unanswered(4002)
    (finding,) = diagnosed_log(tmp_path, two + waits + summary(1, -15, -15)).findings
    assert (finding.category.value, finding.ranks) == ("env-mismatch", (1, 2))
    assert "port 4001 and 4002" in finding.cause and "on port 29500" in finding.cause
    # One of both may only be late; or they looked at the right port.
    for ports in (unanswered(4001), unanswered(4001) + unanswered(29500)):
        assert told(tmp_path, ports + waits + summary(1, -15, -15)) == [("undecided", ())]


def test_a_rank_that_a_test_keeps_from_set_up_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        'import torch.distributed as dist\nif RANK == 0:\n    dist.init_process_group("gloo")\n'
    )
    error = traceback('dist.init_process_group("gloo")', KEYS).replace("train.py", str(script))
    (finding,) = diagnosed_log(tmp_path, error + summary(1)).findings
    assert (finding.category.value, finding.ranks) == ("missing-rank", (1,))
    assert "if RANK == 0" in finding.cause
    # Another test, or none: the rank may be no process at all, or have ended before.
    for test in ("if READY:", "if RANK < 4:", "with block:"):
        script.write_text(
            f'import torch.distributed as dist\n{test}\n    dist.init_process_group("gloo")\n'
        )
        (finding,) = diagnosed_log(tmp_path, error + summary(1)).findings
        assert finding.category.value == "undecided"
        assert "rank 0 waited in set-up for rank 1, which never joined" in finding.cause


def test_who_gave_up_and_who_did_not_stands_in_what_is_undecided(tmp_path: Path) -> None:
    late = traceback("dist.barrier()", "RuntimeError: Timed out waiting 12000ms for send operation")
    closed = traceback("dist.barrier()", "RuntimeError: [pair.cc:553] Connection closed by peer")
    (finding,) = diagnosed_log(tmp_path, late + summary(1, 1, -15)).findings
    assert "ranks 0-1 gave up waiting, rank 2 did not" in finding.cause
    (finding,) = diagnosed_log(tmp_path, closed + summary(1, 1)).findings
    assert finding.category.value == "undecided" and "which rank closed it first" in finding.cause


def test_logs_of_two_jobs_are_not_judged_as_one(tmp_path: Path) -> None:
    for name, pid in (("one", 50), ("other", 70)):
        row = f"  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: {pid})\n"
        (tmp_path / f"{name}.log").write_text(traceback("f()", f"ValueError: {name}") + row)
    with pytest.raises(UsageMistake, match="in their logs rank 0 is process 50"):
        dead.why([tmp_path])
    assert dead.why([tmp_path / "one.log"]).diagnosis.findings


def test_errors_that_differ_and_name_no_rank_are_facts(tmp_path: Path) -> None:
    errors = traceback("f()", "ValueError: a") + traceback("f()", "KeyError: 'b'")
    (finding,) = diagnosed_log(tmp_path, errors + summary(1, 1)).findings
    assert (finding.category.value, finding.ranks) == ("undecided", ())
    assert "does not tell which ranks raised ValueError: a; KeyError: 'b'" in finding.cause
