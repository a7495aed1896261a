"""What ranks hold, arranged by the mesh: `%ddp_mesh`."""

from __future__ import annotations

import json
from dataclasses import replace

from ddp_notebook.diagnosis.collectives.meshes import Mesh, arranged, mesh_of
from ddp_notebook.model import Activity, Case, GroupMade, RankReport
from ddp_notebook.model.ddp import HeldParameter, HeldParameters, MeshLayout
from ddp_notebook.views import mesh as view
from ddp_notebook.views.notebook import mime_bundle

PLACES = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
DP_TP = Mesh((("dp", 2), ("tp", 2)), PLACES)


def held(rank: int, name: str = "layers.0.weight", size: int = 64) -> HeldParameter:
    """A part of 256 bytes, sharded by FSDP2 over dp and by tensor parallel over tp."""
    return HeldParameter(
        "net",
        name,
        (8, 8),
        "float32",
        size,
        256,
        ("Shard(0)", "Shard(1)"),
        ("dp", "tp"),
        (2, 2),
        (0, 1, 2, 3),
        "FSDP2",
        ("forward", "backward"),
        (0, 2) if rank % 2 == 0 else (1, 3),
    )


def everywhere(*names: str) -> dict[int, HeldParameters]:
    return {r: HeldParameters(tuple(held(r, name) for name in names)) for r in PLACES}


def layout() -> MeshLayout:
    return arranged(DP_TP, everywhere("layers.0.weight", "layers.1.weight"), 4)


def test_placement_bytes_and_who_gathers_are_told_by_dimension() -> None:
    row = layout().models[0].parameters[0]
    assert row.placement == "dp: Shard(0), tp: Shard(1)"
    assert row.bytes == (((0, 1, 2, 3), 64),)
    assert (row.gathers, row.over) == (("forward", "backward"), "dp")
    assert layout().bytes == dict.fromkeys(range(4), 128)


def test_the_picture_has_each_rank_at_its_place_and_what_it_holds() -> None:
    text = view.text(layout())
    assert "tp=0    tp=1" in text and "dp=1  rank 2  rank 3" in text
    assert "layers.0-1.weight" in text and "forward, backward: dp" in text
    bundle = mime_bundle(layout())
    assert bundle["text/plain"] == text
    assert bundle["text/html"].count("width: 100%") == 4
    json.dumps(layout().to_json())


def test_a_rank_that_holds_another_placement_has_a_row_of_its_own() -> None:
    of_rank = everywhere("weight")
    other = replace(held(3, "weight"), placements=("Replicate", "Shard(1)"), bytes=128)
    of_rank[3] = HeldParameters((other,))
    rows = arranged(DP_TP, of_rank, 4).models[0].parameters
    assert [(row.ranks, row.placement) for row in rows] == [
        ((0, 1, 2), "dp: Shard(0), tp: Shard(1)"),
        ((3,), "dp: Replicate, tp: Shard(1)"),
    ]


def test_the_mesh_of_the_parameters_stands_in_where_no_group_tells_it() -> None:
    found = arranged(None, everywhere("weight"), 4)
    assert found.dimensions == DP_TP.dimensions and found.coordinates == PLACES
    unnamed = {
        r: HeldParameters((replace(held(r), dimensions=(), mesh_shape=(4,), group=(0, 1, 2, 3)),))
        for r in range(4)
    }
    row = arranged(None, unnamed, 4).models[0].parameters[0]
    assert row.over == "all ranks"


def test_without_a_mesh_the_models_are_shown_all_the_same() -> None:
    ddp = HeldParameter("model", "weight", (3, 3), "float32", 36, 36, wrapper="DDP", group=(0, 1))
    text = view.text(arranged(None, {0: HeldParameters((ddp,)), 1: HeldParameters((ddp,))}, 2))
    assert "No mesh; 2 ranks." in text and "Replicate (DDP)" in text and "never" in text


def test_a_thousand_ranks_are_ranges_within_the_width() -> None:
    coordinates = {rank: divmod(rank, 8) for rank in range(1024)}
    places = Mesh((("dp", 128), ("tp", 8)), coordinates)
    of_rank = {r: HeldParameters((replace(held(r), group=()),)) for r in range(1024)}
    lines = view.text(arranged(places, of_rank, 1024)).splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 100


def _case(made: list[GroupMade]) -> Case:
    return Case(tuple(RankReport(r, Activity.IDLE, groups_made=tuple(made)) for r in range(4)))


def _dimension(name: str, *groups: tuple[int, ...]) -> list[GroupMade]:
    return [GroupMade(0, members, name, of_mesh=True) for members in groups]


def test_flattened_dimensions_and_further_meshes_are_no_dimensions_of_the_first() -> None:
    made = [
        *_dimension("dp", (0, 2), (1, 3)),
        *_dimension("tp", (0, 1), (2, 3)),
        *_dimension("cp", (0,), (1,), (2,), (3,)),
        *_dimension("dp_tp", (0, 1, 2, 3)),
        *_dimension("ep", (0, 1), (2, 3)),
        GroupMade(0, (0, 1, 2, 3), "checkpoints"),
    ]
    found = mesh_of(_case(made))
    assert found is not None and found.shape == "dp[2] x tp[2] x cp[1]"
