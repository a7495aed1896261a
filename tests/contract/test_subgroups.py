"""Groups of `new_group`: ranks blocked in one are freed, and the user's group works again."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import pytest
from results import rank_pids

from ddp_notebook.errors import Stuck, UsageMistake
from ddp_notebook.magics.ui import chosen_ranks
from ddp_notebook.model import Category
from ddp_notebook.session import Session

pytestmark = pytest.mark.timeout(120)

GROUPS = """
first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
held = {"in a dict": dist.new_group([1, 3])}
destroyed = dist.new_group([0, 2])
if rank in (0, 2):
    dist.destroy_process_group(destroyed)
torch.manual_seed(0)
if rank < 2:
    model = DDP(torch.nn.Linear(3, 1), process_group=second)
"""
BLOCKED = """
if rank == 0:
    dist.barrier(group=first)
if rank == 1:
    model(torch.ones(1, 3)).sum().backward()
"""
WORK = """
for group, members in ((first, [0, 1]), (second, [0, 1]), (held["in a dict"], [1, 3])):
    if rank in members:
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        assert x == len(members)
        assert dist.get_process_group_ranks(group) == members
        assert dist.get_rank(group) == members.index(rank)
x = torch.ones(1)
dist.all_reduce(x)
assert x == 4
if rank < 2:
    model.zero_grad()
    model(torch.full((1, 3), float(rank))).sum().backward()
    assert model.process_group is second
    assert (model.module.weight.grad == 0.5).all(), "the mean of both"
"""


@pytest.fixture
def ranks(ranks4: Session) -> Iterator[Session]:
    """Four ranks with groups of their own."""
    ranks4.run_cell(GROUPS).raise_for_error()
    yield ranks4
    if not ranks4.record.snapshot.ready:
        ranks4.abort()
    names = ("first", "second", "held", "destroyed", "model", "group")
    ranks4.run_cell(f"for name in {names}:\n    globals().pop(name, None)").raise_for_error()


def test_ranks_blocked_in_groups_are_freed_and_go_on_with_them(ranks: Session) -> None:
    pids = rank_pids(ranks)
    for _ in range(2):  # what was made again is made again
        result = ranks.run_cell(BLOCKED)
        assert isinstance(result.error, Stuck)
        board = ranks.abort()
        assert [state.pid for state in board.snapshot.ranks] == pids
        said = board.snapshot.ranks[2].detail
        assert said.count("made again") == 3, "not the one that was destroyed"
        ranks.run_cell(WORK).raise_for_error()


def test_a_group_that_a_member_has_no_more_is_told_and_not_made(ranks: Session) -> None:
    ranks.run_cell("if rank == 1:\n    del first").raise_for_error()
    ranks.run_cell(BLOCKED)
    board = ranks.abort()
    assert "no group of ranks 0 and 1 (rank 1 lost it: new_group)" in board.snapshot.ranks[0].detail
    ranks.run_cell("x = torch.ones(1)\ndist.all_reduce(x)\nassert x == 4").raise_for_error()


def test_new_group_that_not_every_rank_calls_is_named(ranks: Session) -> None:
    result = ranks.run_cell("if rank != 2:\n    more = dist.new_group()\nelse:\n    dist.barrier()")
    assert isinstance(result.error, Stuck) and result.diagnosis is not None
    finding = result.diagnosis.findings[0]
    assert (finding.category, finding.ranks) == (Category.SUBGROUP_MISUSE, (2,))
    pids = rank_pids(ranks)
    board = ranks.abort()
    assert [state.pid for state in board.snapshot.ranks] == pids
    ranks.run_cell(WORK).raise_for_error()


MESH = """
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
"""
END_MESH = """
for name in ("dp", "tp"):
    dist.destroy_process_group(mesh.get_group(name))
del mesh, name
"""


def test_ranks_are_chosen_by_their_places_in_a_mesh(ranks4: Session) -> None:
    with pytest.raises(UsageMistake, match="the ranks have no mesh"):
        chosen_ranks(ranks4, Namespace(ranks="dp=0"))
    ranks4.run_cell(MESH).raise_for_error()
    for places, of_mesh in (("dp=0", "dp == 0"), ("tp=1", "tp == 1"), ("dp=1,tp=0", "rank == 2")):
        ranks = chosen_ranks(ranks4, Namespace(ranks=places))
        ranks4.run_cell(f"chosen = {places!r}", ranks=ranks).raise_for_error()
        ranks4.run_cell(
            "dp, tp = mesh.get_coordinate()\n"
            f"assert (globals().get('chosen') == {places!r}) == ({of_mesh})"
        ).raise_for_error()
    with pytest.raises(UsageMistake, match="dp is 0 to 1"):
        chosen_ranks(ranks4, Namespace(ranks="dp=2"))
    ranks4.run_cell(END_MESH + "del dp, tp\nglobals().pop('chosen', None)").raise_for_error()


SHARDED = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(net[0], mesh=mesh["dp"])
fully_shard(net, mesh=mesh["dp"])
"""


def test_what_ranks_hold_is_told_also_while_they_are_blocked(ranks4: Session) -> None:
    ranks4.run_cell(MESH + SHARDED).raise_for_error()
    layout = ranks4.layout()
    (model,) = layout.models
    weight = model.parameters[0]
    assert (model.name, weight.name) == ("net", "0.weight")
    assert weight.placement == "dp: Shard(0) strided, tp: Shard(0)"
    assert weight.bytes == (((0, 1, 2, 3), 128),) and weight.whole_bytes == 512
    assert weight.gathers == ("forward", "backward") and weight.over == "dp"
    assert model.parameters[-1].gathers == ("forward",), "the root is not freed after forward"
    blocked = ranks4.run_cell("if rank == 1:\n    dist.barrier()\nelse:\n    net(torch.ones(2, 8))")
    assert isinstance(blocked.error, Stuck)
    assert ranks4.layout().models == layout.models, "gathered parameters are those of the unit"
    assert ranks4.layout(chosen_ranks(ranks4, Namespace(ranks="dp=0"))).bytes.keys() == {0, 1}
    ranks4.abort()
    ranks4.run_cell("del net, mesh\nimport gc\n_ = gc.collect()").raise_for_error()
