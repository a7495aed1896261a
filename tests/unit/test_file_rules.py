"""Paths that ranks change under each other, and a store's file that was deleted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collective_cases import found, same, the_one
from traces import all_reduce, places, play, raised, with_facts

from ddp_notebook.model import Activity, Case, InitArguments, Place, RankReport, StoreFile

MAKE = "import os\nos.makedirs(path)\ndist.all_reduce(x)\n"
BY_ONE = "import os\nif rank == 1:\n    os.makedirs(path)\ndist.all_reduce(x)\n"


def failed(error: str, line: int, text: str) -> RankReport:
    at = (Place("train.py", line, "", text),)
    return with_facts(raised(f"[Errno 17] {error}: '/data/out'", error), error_at=at)


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
