"""What a finding says: the subject once, equal ranks together, and no more than is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from collective_cases import found, lost, refused, same, the_one
from traces import BUSY, all_reduce, barrier, died, message, places, play, raised, with_facts

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.launch import out_of_memory
from ddp_notebook.model import (
    Case,
    Category,
    Diagnosis,
    Finding,
    RankExited,
    RankReport,
    Ranks,
    RankSpawned,
)
from ddp_notebook.testing import fake_run

# -- the subject ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "cause", "sentence"),
    [
        ((2,), "rank 2 has skipped it", "Rank 2 has skipped it"),
        ((0, 2), "ranks 0 and 2 have left", "Ranks 0 and 2 have left"),
        ((0,), "ranks 0 and 2 have left", "Rank 0: ranks 0 and 2 have left"),
        ((1,), "rank 12 waits", "Rank 1: rank 12 waits"),
        ((1,), "raised ValueError: x", "Rank 1 raised ValueError: x"),
        ((), "a file is there", "No rank in particular: a file is there"),
    ],
)
def test_the_subject_is_said_once(ranks: Ranks, cause: str, sentence: str) -> None:
    finding = Finding(Category.UNDECIDED, ranks, cause, "")
    assert finding.sentence == sentence
    diagnosis = Diagnosis((finding, finding))
    assert diagnosis.headline == sentence
    findings = diagnosis.to_json()["findings"]
    assert [wire["sentence"] for wire in findings] == [sentence] * 2, "each is understood alone"


# -- ranks that are late -------------------------------------------------------------------


def late(case: Case) -> list[tuple[Ranks, str]]:
    return [(f.ranks, f.sentence) for f in diagnose_run(case).findings if f.passing]


def test_a_rank_is_not_told_that_it_has_not_called_recv_from_itself() -> None:
    at = replace(BUSY, path=places(7))
    case = play({0: [message("recv", 1, 5)], 1: []}, {1: at})
    ((ranks, sentence),) = late(case)
    assert ranks == (1,)
    assert sentence.startswith(
        "Rank 1 has not yet called the `send` that rank 0 is waiting for: it is busy at train.py"
    )
    # Of a chain the rank that is late is told of who waits for it, not of who waits for those.
    case = play({0: [message("recv", 1, 5)], 1: [message("send", 2, 6)], 2: []}, {2: at})
    assert late(case)[0][1].startswith("Rank 2 has not yet called the `recv` that rank 1 is")


def test_three_ranks_that_are_late_in_one_line_are_one_box() -> None:
    at = replace(BUSY, path=places(7))
    case = play(same(4, [], r0=[barrier(9)]), dict.fromkeys((1, 2, 3), at))
    ((ranks, sentence),) = late(case)
    assert ranks == (1, 2, 3)
    assert sentence.startswith("Ranks 1-3 have not yet called `barrier`: they are busy at train.py")
    other = {1: at, 2: at, 3: replace(BUSY, path=places(8))}
    (finding,) = diagnose_run(play(same(4, [], r0=[barrier(9)]), other)).findings
    assert (finding.ranks, finding.passing) == ((1, 2, 3), True)
    assert finding.cause.endswith("they are busy")
    places_of = [line.partition("busy at ")[2] for line in finding.evidence[:3]]
    assert places_of[0] == places_of[1] != places_of[2]


# -- sends and receives --------------------------------------------------------------------


def test_a_ring_names_its_ranks_each_with_its_line() -> None:
    # Rank 1 receives from rank 3, which is in the barrier; rank 0 sends to rank 1.
    case = play(
        {
            0: [message("send", 1, 5), barrier(9)],
            1: [message("recv", 3, 3), barrier(9)],
            2: [barrier(9)],
            3: [barrier(9)],
        }
    )
    finding = the_one(case)
    assert (finding.category, finding.ranks) == (Category.P2P_MISMATCH, (0, 1, 3))
    assert finding.cause.endswith("wait for each other in `send`, `recv` and `barrier`")
    assert finding.evidence[0].startswith("rank 0, `send` to rank 1 at train.py")
    assert finding.evidence[2].startswith("rank 3, `barrier` at train.py")
    assert finding.waiting == (2,)


def test_two_pairs_with_one_mistake_are_one_box() -> None:
    first = {
        rank: [message("recv", rank ^ 1, 5), message("send", rank ^ 1, 6)] for rank in range(4)
    }
    finding = the_one(play(first))
    assert finding.ranks == (0, 1, 2, 3)
    assert finding.cause == "Deadlock: ranks 0-3 all call `recv` before `send`"


def test_messages_that_are_sent_and_received_together_are_not_told_to_be() -> None:
    def pair(to: int, of: int) -> list:
        api = {"api": "batch_isend_irecv"}
        return [message("send", to, 5, **api), message("recv", of, 5, **api)]

    case = play({rank: pair((rank + 1) % 3, (rank + 1) % 3) for rank in range(3)})
    finding = the_one(case)
    assert finding.cause == "No send of ranks 0-2 has a matching recv on its peer"
    assert "batch_isend_irecv" not in finding.remedy


# -- refusals ------------------------------------------------------------------------------


def test_a_refusal_of_ours_is_never_an_exception_of_the_rank() -> None:
    step = all_reduce(9)
    odd = replace(step, operation="all_to_all", api="all_to_all", numel=8)
    rest = replace(odd, numel=4)
    case = play(same(3, [rest], r1=[refused(odd)]), {1: raised("rank 1 brings", "Mismatch")})
    finding = the_one(case)
    assert finding.category is Category.SHAPE_MISMATCH
    assert "nothing was sent" in finding.cause
    assert finding.waiting == (0, 2) or finding.ranks == (0, 1, 2)


# -- ranks whose process ended --------------------------------------------------------------


def dead(rank: int = 1, **more: object) -> RankReport:
    return with_facts(died(-9), rank=rank, **more)


def killed(**more: object) -> Finding:
    return the_one(play(same(3, [barrier(5)], r1=[]), {1: dead(**more)}))


def test_lack_of_memory_is_only_said_with_proof() -> None:
    unknown = killed()
    assert unknown.category is Category.RANK_DIED
    assert unknown.cause.startswith(
        "Rank 1 was killed by SIGKILL, by the out-of-memory killer or by `kill -9`"
    )
    assert "less memory" not in unknown.remedy
    by_hand = killed(oom_kills=0, peak_bytes=3 << 20)
    assert "not by the out-of-memory killer" in by_hand.cause
    assert "less memory" not in by_hand.remedy
    assert "rank 1: used at most 3 MiB of memory" in by_hand.evidence
    assert any("killer ended 0 processes" in line for line in by_hand.evidence)
    proved = killed(oom_kills=1)
    assert proved.category is Category.OOM_ON_ONE_RANK
    assert proved.remedy.startswith("Use less memory per rank. ")
    assert killed(exit_code=-11).cause == (
        "Rank 1 was killed by SIGSEGV; ranks 0 and 2 still need it"
    )


def test_what_brings_a_dead_rank_back_fits_what_the_others_do() -> None:
    waiting = play(same(3, [barrier(5)], r1=[]), {1: dead()})
    finding = the_one(waiting)
    assert finding.remedy == (
        "Free the other ranks, which also gives rank 1 a new process: `%ddp_abort`."
    )
    assert finding.commands == ("%ddp_abort",)
    assert the_one(lost(waiting, 0, 2)).remedy == "Bring rank 1 back: `%ddp_restart --ranks 1`."


def test_ranks_that_died_alike_are_one_finding() -> None:
    case = play(same(4, [barrier(5)], r1=[], r2=[]), {1: dead(), 2: dead(2)})
    finding = the_one(case)
    assert finding.ranks == (1, 2)
    assert finding.remedy == (
        "Free the other ranks, which also gives ranks 1 and 2 new processes: `%ddp_abort`."
    )
    assert (
        the_one(lost(case, 0, 3)).remedy == "Bring ranks 1 and 2 back: `%ddp_restart --ranks 1-2`."
    )
    other = play(same(4, [barrier(5)], r1=[], r2=[]), {1: dead(), 2: dead(2, exit_code=3)})
    assert found(other) == [("rank-died", (1,)), ("rank-died", (2,))]


def test_words_of_what_ran_before_are_not_called_the_last_of_this_run() -> None:
    finding = killed(last_words="noise of a thread of an earlier script")
    assert finding.evidence[-1].startswith("rank 1: its log ends with: noise")


def test_a_rank_that_has_a_new_process_is_not_to_be_restarted() -> None:
    run = fake_run(1, (0, 1, 2))
    run.take([RankExited(rank=1, pid=7, exit_code=-9), RankExited(rank=2, pid=8, exit_code=-9)])
    assert "bring back with %ddp_restart --ranks 1-2" in str(run.error())
    run.take([RankSpawned(rank=1, pid=9, device="cpu")])
    error = str(run.error())
    assert "bring back with %ddp_restart --ranks 2;" in error
    assert "rank 1 has a new process now, without variables" in error


@pytest.mark.parametrize(
    ("membership", "file", "text"),
    [
        ("0::/pod\n", "pod/memory.events", "low 0\noom 3\noom_kill 2\n"),
        ("4:memory:/pod\n", "memory/pod/memory.oom_control", "under_oom 0\noom_kill 2\n"),
        ("", "vmstat", "nr_free 9\noom_kill 2\n"),
    ],
)
def test_the_kernels_count_of_what_it_killed(
    tmp_path: Path, membership: str, file: str, text: str
) -> None:
    where = tmp_path / file
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(text)
    (tmp_path / "cgroup").write_text(membership)
    paths = (tmp_path, tmp_path / "cgroup", tmp_path / "vmstat")
    assert out_of_memory.kills(*paths) == 2
    where.write_text("max 0\n")
    assert out_of_memory.kills(*paths) is None
