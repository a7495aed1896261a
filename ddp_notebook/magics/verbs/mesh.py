"""`%ddp_mesh`: where each rank is in the mesh, and what it holds of each parameter."""

from __future__ import annotations

import argparse

from ddp_notebook.magics import options
from ddp_notebook.magics.ui import CallerUi, chosen_ranks, value_or_json
from ddp_notebook.magics.verb import Verb
from ddp_notebook.model.ddp import MeshLayout


def _mesh(ui: CallerUi, args: argparse.Namespace) -> MeshLayout | None:
    ui.session.pool.need("%ddp_mesh")
    return value_or_json(ui, args, ui.session.layout(chosen_ranks(ui.session, args)))


MESH = Verb(
    "ddp_mesh",
    about="Show the device mesh and the models on it, at any time: where each rank is, each "
    "parameter's placement, its bytes on each rank, and which ranks gather it when. Returns a "
    "MeshLayout.",
    examples=(
        ("%ddp_mesh", "the mesh, and what each rank holds"),
        ("%ddp_mesh --ranks dp=0", "the parameters of the ranks at a place in the mesh"),
    ),
    run=_mesh,
    options=(options.ranks("show these ranks only"), options.JSON),
)
