"""All ranks' stacks as one tree: nothing is lost in it, and it is drawn so that it can be read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import Page, whole_page

from ddp_notebook.model import (
    Activity,
    Branch,
    Doing,
    Frame,
    Local,
    RankStack,
    StackTree,
    codec,
)
from ddp_notebook.views import stacks
from ddp_notebook.views.stack_tree import merge

BLOCKED = Doing(Activity.WAITING, "all_reduce")
BUSY = Doing(Activity.BUSY)
IDLE = Doing(Activity.IDLE)
MAIN = Frame("/job/train.py", 58, "<module>", "main()")
LOSS = Frame("/job/train.py", 44, "main", "loss.backward()")
REDUCE = Frame("/job/train.py", 41, "step", "dist.all_reduce(x)")
BARRIER = Frame("/job/train.py", 47, "step", "dist.barrier()")
TORCH = Frame(
    "/site-packages/torch/distributed/distributed_c10d.py",
    3007,
    "all_reduce",
    "work.wait()",
    "torch.distributed.distributed_c10d",
    library=True,
)
TORCH_BARRIER = replace(TORCH, function="barrier", line=5000)

said = st.text(max_size=8) | st.sampled_from(["\x1b[31m", "\n", "<b>", "&", "x" * 150, "None"])
local_values = st.builds(Local, st.sampled_from("abc"), said)
some_locals = st.lists(local_values, max_size=3, unique_by=lambda each: each.name).map(tuple)
frames = st.builds(
    Frame,
    st.sampled_from(["cell 3", "/a/train.py", "/b/train.py", ""]),
    st.integers(1, 3),
    st.sampled_from(["<module>", "step"]) | said,
    st.just("f()") | said,
    st.sampled_from(["", "torch.distributed", "torch"]),
    st.booleans(),
    some_locals,
)
doings = st.builds(Doing, st.sampled_from(Activity), st.sampled_from(["", "all_reduce"]), said)
alike = st.sampled_from([MAIN, LOSS, REDUCE, TORCH])
"""Few of them: ranks are to share some."""
some_frames = st.lists(alike | frames, max_size=5).map(tuple)
rank_sets = st.lists(st.integers(0, 40), max_size=8, unique=True)


@st.composite
def job_stacks(draw: st.DrawFn) -> list[RankStack]:
    pool = draw(st.lists(some_frames, min_size=1, max_size=3))
    ends = draw(st.lists(doings, min_size=1, max_size=2))
    return [
        RankStack(rank, draw(st.sampled_from(ends)), draw(st.sampled_from(pool) | some_frames))
        for rank in draw(rank_sets)
    ]


def branches_of(tree: StackTree) -> Iterator[Branch]:
    waiting = list(tree.branches)
    while waiting:
        branch = waiting.pop()
        yield branch
        waiting += branch.children


def as_sets(stack: RankStack) -> object:
    """A stack in which the order of a frame's variables does not count."""
    return stack.doing, [(replace(f, locals=()), set(f.locals)) for f in stack.frames]


# --------------------------------------------------------------------------- the tree


@given(job_stacks())
def test_every_stack_is_in_the_tree_as_it_was(found: list[RankStack]) -> None:
    tree = merge(found, 41)
    assert tree.ranks == tuple(sorted(stack.rank for stack in found))
    for stack in found:
        assert as_sets(tree.stack(stack.rank)) == as_sets(stack)


@given(job_stacks())
def test_every_rank_is_on_exactly_one_path_to_an_end(found: list[RankStack]) -> None:
    tree = merge(found, 41)
    ends = [rank for b in branches_of(tree) if b.doing is not None for rank in b.ranks]
    assert sorted(ends) == sorted(stack.rank for stack in found)
    for branch in branches_of(tree):
        assert (branch.doing is None) == bool(branch.children)
        parted = [rank for child in branch.children for rank in child.ranks]
        assert not branch.children or sorted(parted) == list(branch.ranks)


def raised(branch: Branch) -> bool:
    if branch.doing is not None:
        return branch.doing.activity is Activity.FAILED
    return any(map(raised, branch.children))


@given(job_stacks())
def test_branches_are_sorted_and_are_folded_as_far_as_they_go(found: list[RankStack]) -> None:
    tree = merge(found, 41)
    for siblings in (tree.branches, *(b.children for b in branches_of(tree))):
        order = [(not raised(b), b.ranks[0]) for b in siblings]
        assert order == sorted(order)
        assert len(siblings) != 1 or siblings is tree.branches
        first = [
            (raised(b), replace(b.frames[0], locals=())) if b.frames else b.doing for b in siblings
        ]
        assert len(set(first)) == len(first), "ranks at the same line share a branch"


@given(job_stacks())
def test_a_variable_stands_once_with_all_ranks_that_have_its_value(found: list[RankStack]) -> None:
    for branch in branches_of(merge(found, 41)):
        for frame in branch.frames:
            assert len({(each.name, each.text) for each in frame.locals}) == len(frame.locals)
            assert all(set(each.ranks) <= set(branch.ranks) for each in frame.locals)


@given(job_stacks())
def test_both_survive_json(found: list[RankStack]) -> None:
    tree = merge(found, 41)
    assert codec.decode(StackTree, json.loads(str(tree))) == tree
    for stack in found:
        assert codec.decode(RankStack, json.loads(json.dumps(codec.encode(stack)))) == stack


def test_a_rank_that_is_not_in_the_tree_has_no_stack() -> None:
    with pytest.raises(KeyError):
        merge([RankStack(1, IDLE)], 2).stack(0)


def test_a_stack_that_ends_where_others_go_on_is_a_branch_without_frames() -> None:
    tree = merge([RankStack(0, BLOCKED, (MAIN, REDUCE)), RankStack(1, BUSY, (MAIN,))], 2)
    (root,) = tree.branches
    assert root == Branch(
        (0, 1),
        (MAIN,),
        children=(Branch((0,), (REDUCE,), BLOCKED), Branch((1,), (), BUSY)),
    )


# --------------------------------------------------------------------------- as text

PARTED = merge(
    [
        *(RankStack(r, BLOCKED, (MAIN, LOSS, REDUCE, TORCH)) for r in (0, 2, 3)),
        RankStack(1, Doing(Activity.WAITING, "barrier"), (MAIN, LOSS, BARRIER, TORCH_BARRIER)),
    ],
    4,
)


def test_ranks_that_part_are_drawn_below_what_they_share() -> None:
    barrier = "waiting in barrier (torch.distributed)  train.py, line 47  step()  dist.barrier()"
    assert stacks.text(PARTED).split("\n") == [
        "ranks 0-3  train.py, line 58          main()",
        "│  train.py, line 44  main()  loss.backward()",
        "├─ ranks 0, 2 and 3  waiting in all_reduce (torch.distributed)",
        "│     train.py, line 41  step()  dist.all_reduce(x)",
        f"└─ rank 1  {barrier}",
    ]


def test_ranks_that_are_nowhere_are_said_to_be() -> None:
    tree = merge(
        [
            RankStack(0, IDLE),
            RankStack(1, Doing(Activity.DEAD, text="killed by SIGKILL")),
            RankStack(2, Doing(Activity.SILENT, text="last seen: cell 3, line 2")),
            RankStack(3, IDLE),
            RankStack(4, Doing(Activity.FAILED, text="KeyError: 'x'")),
            RankStack(5, Doing(Activity.HELD, text="store")),
            RankStack(6, Doing(Activity.WAITING, "rendezvous", "waits for rank 5 to join")),
        ],
        7,
    )
    assert stacks.text(tree) == dedent(
        """\
        rank 4  idle since it failed: KeyError: 'x'
        ranks 0 and 3  idle
        rank 1  dead: killed by SIGKILL
        rank 2  does not answer: last seen: cell 3, line 2
        rank 5  paused before store
        rank 6  waiting in rendezvous (waits for rank 5 to join)"""
    )
    assert stacks.text(StackTree()) == "No ranks are running."


def test_a_long_error_is_seen_to_be_cut() -> None:
    tree = merge([RankStack(0, Doing(Activity.FAILED, text="e" * 201))], 1)
    unfolded = "".join(stacks.text(tree).split())
    assert unfolded.endswith("failed:" + "e" * 199 + "…")


def test_locals_that_are_alike_stand_once_and_others_by_their_ranks() -> None:
    def at(rank: int, *found: Local) -> RankStack:
        return RankStack(rank, BUSY, (replace(MAIN, file="cell 3", locals=found),))

    lr = Local("lr", "0.1")
    tree = merge([at(0, lr, Local("n", "0")), at(1, lr, Local("n", "7")), at(2, lr)], 3)
    assert stacks.text(tree) == dedent(
        """\
        ranks 0-2  running
           cell 3, line 58  main()
               lr = 0.1
               n = 0 (rank 0), 7 (rank 1)"""
    )


def test_ranks_that_wait_in_the_same_collective_are_together_at_whichever_line_of_torch() -> None:
    ways = ((REDUCE, TORCH, TORCH), (REDUCE, replace(TORCH, line=3001)), (REDUCE, TORCH))
    tree = merge([RankStack(rank, BLOCKED, way) for rank, way in enumerate(ways)], 3)
    assert tree.branches[0].children, "they are apart in the tree"
    waits = "waiting in all_reduce (torch.distributed)"
    assert stacks.text(tree) == f"ranks 0-2  {waits}  train.py, line 41  step()  dist.all_reduce(x)"


def test_ranks_that_part_within_torch_are_told_apart_by_what_they_are_at() -> None:
    other = replace(TORCH, line=3001)
    tree = merge(
        [RankStack(0, BLOCKED, (REDUCE, TORCH, TORCH)), RankStack(1, BUSY, (REDUCE, other))], 2
    )
    shown = stacks.text(tree)
    assert "├─ rank 0  waiting in all_reduce (torch.distributed)" in shown
    assert "└─ rank 1  in all_reduce (torch.distributed)" in shown


def test_files_of_the_same_name_are_told_apart_by_their_folders() -> None:
    tree = merge([RankStack(0, BUSY, (MAIN, replace(LOSS, file="/lib/train.py")))], 1)
    shown = stacks.text(tree)
    assert "job/train.py, line 58" in shown
    assert "lib/train.py, line 44" in shown


@given(job_stacks())
def test_no_line_is_wider_than_100_columns_but_where_the_tree_is_deep(
    found: list[RankStack],
) -> None:
    for line in stacks.text(merge(found, 41)).split("\n"):
        assert line.isprintable()
        assert len(line) <= 100


# --------------------------------------------------------------------------- as HTML


def page_of(tree: StackTree) -> Page:
    """The page of a tree, in which there are no tags and attributes but ours."""
    page = whole_page(stacks.html(tree))
    assert set(page.tags) <= {"div", "span", "code", "details", "summary"}
    assert {name for name, _ in page.attributes} <= {"class", "style", "title", "open"}
    return page


@given(job_stacks())
def test_nothing_said_becomes_markup(found: list[RankStack]) -> None:
    page_of(merge(found, 41))


def test_the_page_says_what_the_text_says_and_folds_the_frames_of_torch() -> None:
    page = stacks.html(PARTED)
    text = page_of(PARTED).text
    for expected in ("ranks 0-3", "ranks 0, 2 and 3", "waiting in all_reduce (torch.distributed)"):
        assert expected in text
    assert page.count("<details style") == 2
    assert "1 frame of torch" in text
    assert not re.search(r"#[0-9a-f]{3,6}\b|: *(white|black)\b", page), "colours of one theme"
