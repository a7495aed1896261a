"""Paths that ranks change under each other, and a store's file that was deleted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collective_cases import found, same, the_one
from traces import all_reduce, places, play, raised

from ddp_notebook.diagnosis import diagnose_training
from ddp_notebook.model import (
    Activity,
    Case,
    Collectives,
    InitArguments,
    Place,
    RankReport,
    RunFacts,
    SaveFacts,
    StoreFile,
)

MAKE = "import os\nos.makedirs(path)\ndist.all_reduce(x)\n"
BY_ONE = "import os\nif rank == 1:\n    os.makedirs(path)\ndist.all_reduce(x)\n"


def failed(error: str, line: int, text: str) -> RankReport:
    at = (Place("train.py", line, "", text),)
    return replace(raised(f"[Errno 17] {error}: '/data/out'", error), error_at=at)


def case_of(error: str = "FileExistsError", line: int = 2, text: str = "os.makedirs(path)") -> Case:
    return play(same(3, [all_reduce(4)], r1=[]), {1: failed(error, line, text)})


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("FileExistsError", "os.makedirs(path)"),
        ("FileNotFoundError", "os.rename(temporary, path)"),
        ("FileNotFoundError", "shutil.rmtree(path)"),
    ],
)
def test_a_path_that_every_rank_changes_is_all_ranks_mistake(error: str, text: str) -> None:
    code = MAKE.replace("os.makedirs(path)", text)
    finding = the_one(case_of(error, 2, text), {"train.py": code})
    assert (finding.category, finding.ranks) == ("filesystem", (0, 1, 2))
    assert "rank 1 came after another had done it" in finding.cause


@pytest.mark.parametrize(
    ("case", "code"),
    [
        (case_of(line=3), BY_ONE),
        (case_of("FileNotFoundError", 2, "open(path)"), MAKE),
        (case_of("ValueError"), MAKE),
    ],
)
def test_what_one_rank_alone_does_or_only_reads_is_its_own_error(case: Case, code: str) -> None:
    assert found(case, {"train.py": code}) == [("exception-on-one-rank", (1,))]


@pytest.mark.parametrize("by_now", [True, False])
def test_a_file_that_is_there_by_now_was_read_before_it_was_written(by_now: bool) -> None:
    read = failed("FileNotFoundError", 2, "state = torch.load(path)")
    read = replace(read, error_misses="/data/out" * by_now)
    case = play(same(3, [all_reduce(4)], r1=[]), {1: read})
    if not by_now:
        assert found(case) == [("exception-on-one-rank", (1,))]
        return
    finding = the_one(case)
    assert (finding.category, finding.ranks) == ("filesystem", (1,))
    assert "/data/out at train.py:2, and it is there by now" in finding.cause
    assert "dist.barrier()" in finding.remedy


DELETES = "import os\ninit()\nif rank == 0:\n    os.unlink(path)\ndist.new_group([0, 1])\n"


def in_new_group(*, lost: bool) -> Case:
    e = RankReport(
        0,
        Activity.WAITING,
        "store",
        entered=1,
        left=1,
        initialized=True,
        arguments=InitArguments("file", path="/tmp/store"),
        file=StoreFile("/tmp/store", True, lost=lost),
        path=places(5),
    )
    return Case((e, replace(e, rank=1)))


def test_a_stores_file_that_a_rank_deleted_is_told_with_the_rank() -> None:
    finding = the_one(in_new_group(lost=True), {"train.py": DELETES})
    assert (finding.category, finding.ranks) == ("store-gone", (0,))
    assert finding.sentence.startswith(
        "Rank 0 deleted the file of the rendezvous, /tmp/store, at train.py:4, while ranks 0-1"
    )


def test_who_deleted_it_is_not_guessed_and_a_file_that_is_there_is_left_alone() -> None:
    twice = DELETES + "os.remove(log)\n"
    assert found(in_new_group(lost=True), {"train.py": twice}) == [("store-gone", ())]
    assert found(in_new_group(lost=False), {"train.py": DELETES}) == []


def joining(*, lost: bool) -> Case:
    """Rank 1 waits for rank 0, which has come later, and rank 0 for rank 1."""
    came = InitArguments("file", 1, 2, path="/tmp/store", backend="gloo")
    e = RankReport(
        1,
        Activity.WAITING,
        "process-group",
        entered=1,
        arguments=came,
        file=StoreFile("/tmp/store", True, {"0": 1}, lost=lost),
        path=places(3),
    )
    first = replace(e, rank=0, arguments=replace(came, rank=0), file=replace(e.file, lost=False))
    return Case((first, e))


def test_a_rendezvous_file_that_was_deleted_after_a_rank_had_joined_by_it() -> None:
    code = "if rank == 0 and os.path.exists(path):\n  os.remove(path)\ninit()\n"
    finding = the_one(joining(lost=True), {"train.py": code})
    assert (finding.category, finding.ranks) == ("store-gone", (0,))
    assert "/tmp/store, at train.py:2, while rank 1 still needs it" in finding.cause
    assert found(joining(lost=False), {"train.py": code}) == []


OWN = "run = f'/out/{uuid.uuid4().hex}'\ndist.barrier()\nload(run)\ndist.all_reduce(x)\n"
SHARDS = "dist.barrier()\nfor path in files:\n  load(path)\ndist.all_reduce(x)\n"


def missing(*paths: str) -> Case:
    """Rank 0 has its file, the others lack theirs."""
    at = (Place("train.py", 3, "", "load(run)"),)
    reports = {
        rank: replace(raised(f"[Errno 2] No such file: '{path}'", "FileNotFoundError"), error_at=at)
        for rank, path in enumerate(paths, 1)
    }
    return play(same(3, [all_reduce(4)], r1=[], r2=[]), reports)


def test_a_path_that_each_rank_makes_up_itself_is_the_mistake_of_all() -> None:
    finding = the_one(missing("/out/8e8c42/best.pt", "/out/9bde00/best.pt"), {"train.py": OWN})
    assert (finding.category, finding.ranks) == ("filesystem", (0, 1, 2))
    assert "(uuid4)" in finding.cause and "rank 1: /out/8e8c42/best.pt" in finding.evidence


@pytest.mark.parametrize(
    ("paths", "code"),
    [
        (("/out/best.pt", "/out/best.pt"), OWN),
        (("/out/shard-1.pt", "/out/shard-2.pt"), OWN),
        (("/out/cat.png", "/out/dog.png"), SHARDS),
        (("", ""), OWN),
    ],
)
def test_files_that_are_missing_for_other_reasons_are_the_ranks_own_errors(
    paths: tuple[str, str], code: str
) -> None:
    assert {c for c, _ in found(missing(*paths), {"train.py": code})} == {"exception-on-one-rank"}


# -- files that several ranks save ---------------------------------------------------------


def saving(
    *moments: tuple[int, ...], host: str = "a", path: str = "/out/last.pt"
) -> list[RunFacts]:
    at = Place("train.py", 7, "save")
    return [
        RunFacts(
            rank, host="a", saves=(SaveFacts("/out/last.pt", of, at),) if of else (), collectives=9
        )
        for rank, of in enumerate(moments)
    ]


def saved(facts: list[RunFacts]) -> list[tuple[str, tuple[int, ...]]]:
    diagnosis = diagnose_training({each.rank: each for each in facts}, Collectives())
    return [(f.category, f.ranks) for f in diagnosis.findings]


def test_one_file_that_ranks_save_with_nothing_in_between_is_a_race() -> None:
    assert saved(saving((3, 6), (3, 6), (3, 6))) == [("filesystem", (0, 1, 2))]
    assert saved(saving((4,), (), (2, 4))) == [("filesystem", (0, 2))]


def test_files_that_ranks_save_in_turn_or_each_its_own_are_no_race() -> None:
    assert not saved(saving((3, 6), (), ()))
    assert not saved(saving((3,), (4,), (5,))), "a collective lets one after the other save"
    one, other = saving((3,), (3,))
    assert not saved([one, replace(other, host="b")]), "two disks"
    assert not saved([one, replace(other, saves=(SaveFacts("/out/1.pt", (3,)),))])
    assert not saved([one, replace(other, collectives=8)]), "their counts say nothing of order"
    unknown = [replace(each, collectives=0) for each in (one, other)]
    assert not saved(unknown)
