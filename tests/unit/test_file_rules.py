"""Paths that ranks change under each other, and a store's file that was deleted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collective_cases import found, same, the_one
from traces import all_reduce, places, play, raised, with_facts

from ddp_notebook.model import (
    Activity,
    Case,
    InitArguments,
    PathChange,
    Place,
    RankReport,
    StoreFile,
)

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
    assert "rank 1 came too late" in finding.cause


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


# -- a path that is missed ----------------------------------------------------------------

READ = Place("train.py", 6, "load", "torch.load(path)")


def missed(path: str, *, exists: bool = False) -> RankReport:
    e = with_facts(raised("[Errno 2] No such file", "FileNotFoundError"), error_at=(READ,))
    return replace(e, error=replace(e.error, path=path, path_exists=exists))


def changed(case: Case, *changes: tuple[int, str, str]) -> Case:
    """The case, with what ranks did to which path."""
    of = {r: tuple(PathChange(*c) for rank, *c in changes if rank == r) for r in range(3)}
    ranks = (replace(e, process=replace(e.process, changed=of[e.rank])) for e in case.ranks)
    return replace(case, ranks=tuple(ranks))


def without(*ranks: int, exists: bool = False, path: str = "/run/{}/a.pt") -> Case:
    """Ranks that raised, as they did not find a path; the others wait for them."""
    lacking = {f"r{rank}": [] for rank in ranks}
    errors = {rank: missed(path.format(rank), exists=exists) for rank in ranks}
    return play(same(3, [all_reduce(8)], **lacking), errors)


@pytest.mark.parametrize("removed", ["/run/2/a.pt", "/run/2"])
def test_what_a_rank_removed_before_another_was_done_with_it_is_its_mistake(removed: str) -> None:
    finding = the_one(changed(without(2), (0, "written", "/run/2/a.pt"), (0, "removed", removed)))
    assert (finding.category, finding.ranks) == ("filesystem", (0,))
    assert finding.sentence.startswith("Rank 0 removed or renamed `a.pt` before rank 2 was done")
    assert finding.evidence[0].endswith(": /run/2/a.pt")
    assert finding.waiting == (1, 2)


def test_who_looks_for_a_path_before_it_is_made_is_told_who_made_it() -> None:
    finding = the_one(changed(without(1, 2, exists=True, path="/a"), (0, "written", "/a")))
    assert (finding.category, finding.ranks) == ("filesystem", (1, 2))
    assert "before rank 0 has made it" in finding.cause
    made_by_another = the_one(without(1, exists=True))
    assert "before another process has made it" in made_by_another.cause


def test_a_path_of_a_ranks_own_for_what_one_rank_made_elsewhere_is_a_wrong_path() -> None:
    finding = the_one(changed(without(1, 2), (0, "written", "/run/0/a.pt")))
    assert (finding.category, finding.ranks) == ("wrong-path-on-rank", (1, 2))
    assert finding.cause == ("Ranks 1-2 look for `a.pt` in /run/1, but rank 0 made it in /run/0")
    assert "train.py:6 in load" in finding.evidence[0]


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [(0, "written", "/run/0/other.pt")],
        [(0, "written", "/run/0/a.pt"), (1, "written", "/run/1/a.pt")],  # each rank has its own
        [(2, "removed", "/run/2/a.pt")],
    ],
)
def test_a_missing_file_of_which_nothing_else_is_known_is_the_ranks_error(
    changes: list[tuple[int, str, str]],
) -> None:
    finding = the_one(changed(without(2), *changes))
    assert (finding.category, finding.ranks) == ("exception-on-one-rank", (2,))


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
    assert finding.sentence.startswith("Rank 0 deleted the rendezvous file `store` while ranks 0-1")
    assert "rank 0: train.py:4" in finding.evidence and "/tmp/store" in finding.evidence[0]


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
    assert "`store` while rank 1 still needs it" in finding.cause
    assert "rank 0: train.py:2" in finding.evidence and "/tmp/store" in finding.evidence[0]
    assert found(joining(lost=False), {"train.py": code}) == []
