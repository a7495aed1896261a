"""Where ranks are in a mesh, by the groups that they made for its dimensions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collective_cases import same
from traces import all_reduce, barrier, play

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.diagnosis.collectives.meshes import Mesh, mesh_of
from ddp_notebook.model import Case, GroupMade

DP_AND_TP = (("dp", (0, 2)), ("dp", (1, 3)), ("tp", (0, 1)), ("tp", (2, 3)))


def meshed(case: Case, groups: tuple[tuple[str, tuple[int, ...]], ...] = DP_AND_TP) -> Case:
    made = tuple(GroupMade(n, members, name) for n, (name, members) in enumerate(groups))
    return replace(case, ranks=tuple(replace(e, groups_made=made) for e in case.ranks))


def mesh() -> Mesh:
    found = mesh_of(meshed(play(same(4, []))))
    assert found is not None
    return found


def test_each_rank_has_a_coordinate_in_every_dimension() -> None:
    assert mesh().shape == "dp[2] x tp[2]"
    assert [mesh().of(rank) for rank in range(4)] == [
        "dp=0, tp=0",
        "dp=0, tp=1",
        "dp=1, tp=0",
        "dp=1, tp=1",
    ]


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("dp=0", (0, 1)), ("tp=1", (1, 3)), ("dp=1,tp=0", (2,)), ("dp=0-1", (0, 1, 2, 3))],
)
def test_places_are_rank_sets(text: str, ranks: tuple[int, ...]) -> None:
    assert mesh().ranks(text) == ranks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp=2", "dp is 0 to 1 (dp[2] x tp[2])"),
        ("pp=0", "no dimension 'pp'"),
        ("dp", "such as dp=0, got 'dp'"),
        ("dp=0,dp=1", "No rank is at"),
    ],
)
def test_what_is_no_place_is_said(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        mesh().ranks(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "groups",
    [
        (("dp", (0, 2)), ("tp", (0, 1)), ("tp", (2, 3))),
        (("workers", (1, 2, 3)),),
        (("", (0, 1)), ("", (2, 3))),
        (("dp", (0, 2)), ("dp", (1, 3))),
    ],
)
def test_groups_that_do_not_place_every_rank_are_no_mesh(
    groups: tuple[tuple[str, tuple[int, ...]], ...],
) -> None:
    assert mesh_of(meshed(play(same(4, [])), groups)) is None


def test_a_finding_tells_where_its_culprit_is() -> None:
    case = meshed(play(same(4, [barrier(4)], r3=[all_reduce(3), barrier(4)])))
    (finding,) = diagnose_run(case).findings
    assert finding.ranks == (3,)
    assert finding.evidence[-1] == "rank 3 is dp=1, tp=1 of dp[2] x tp[2]"
