"""`%ddp_doctor`: can DDP work here?"""

from __future__ import annotations

import argparse

from ddp_notebook.errors import DDPError
from ddp_notebook.magics import options
from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.ui import NotebookUi, value_or_json
from ddp_notebook.magics.verb import Verb
from ddp_notebook.model.doctor import DoctorReport
from ddp_notebook.session.options import BACKENDS


def _doctor(ui: NotebookUi, args: argparse.Namespace) -> DoctorReport | None:
    from ddp_notebook.doctor import examine  # here for load time: it needs psutil and much else

    session = ui.session
    world_size, rank_facts = 4, None  # the default of %ddp_init
    if session.running:
        world_size = session.record.snapshot.world_size
        try:
            rank_facts = session.overview.rank_facts()
        except DDPError:
            rank_facts = None  # ranks that are busy: a fresh Python is asked about torch instead
    report = examine(
        world_size if args.world_size is None else args.world_size,
        backend=args.backend,
        master_port=args.master_port,
        rank_facts=rank_facts,
    )
    return value_or_json(ui, args, report)


DOCTOR = Verb(
    "ddp_doctor",
    about="Check whether DDP can work here, before anything starts, and how to fix what is wrong. "
    "Ranks that run are checked too. Returns a DoctorReport.",
    examples=(
        ("%ddp_doctor --world-size 4", "can DDP work here, with four ranks?"),
        ("%ddp_doctor --world-size 8 --backend nccl", "for the job you mean to start"),
    ),
    run=_doctor,
    options=(
        Option("-n --world-size N", "number of ranks (default 4, or those that run)", type=int),
        Option("--backend", "the backend you mean to use", choices=BACKENDS),
        Option("--master-port PORT", "the port to check (default: MASTER_PORT)", default=0),
        options.JSON,
    ),
)
