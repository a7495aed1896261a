"""`%ddp_fault`: the fault lab. `%ddp_tour`: five things to try."""

from __future__ import annotations

import argparse

from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics.options import one_of
from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.ui import NotebookUi
from ddp_notebook.magics.verb import Verb
from ddp_notebook.model import Board, Diagnosis
from ddp_notebook.session.tools import fault_lab
from ddp_notebook.session.tools.fault_lab import FaultResult


def _fault(ui: NotebookUi, args: argparse.Namespace) -> Diagnosis | Board | None:
    if args.repair and args.name:
        raise UsageMistake(
            "--repair is for the last fault; leave out its name: %ddp_fault --repair"
        )
    if args.repair:
        result = ui.session.repair()
        _say_replaced(ui, result)
        if result.error:
            raise UsageMistake(f"The repair did not work: {result.error}")
        ui.say(f"Repaired: {result.fault.title}. Setup succeeded.")
        return ui.session.status()
    if not args.name:
        ui.say(fault_lab.listing())
        return None
    fault = fault_lab.find(args.name)
    if args.show:
        ui.say(fault_lab.story(fault, whole=True))
        return None
    ui.session.pool.need("%ddp_fault")
    ui.say(fault_lab.story(fault))
    # The fault is injected into the environment of some ranks, or of a second host; what follows is
    # the session's own setup and diagnosis, as for a mistake of the user's.
    result = ui.session.fault(fault.name)
    _say_replaced(ui, result)
    if result.diagnosis is None:
        ui.say("Setup succeeded despite the fault; no problem was found.")
    elif fault.passes:
        ui.say("Setup succeeded in the end. While the other ranks waited, this was found:")
    else:
        ui.say("This was found. To apply the remedy: %ddp_fault --repair")
    return result.diagnosis


def _say_replaced(ui: NotebookUi, result: FaultResult) -> None:
    for note in result.replaced:
        ui.say(note)


FAULT = Verb(
    "ddp_fault",
    about="Inject a fault into setup and show what is found; without a name, list the faults. "
    "Returns a Diagnosis; after --repair, the board.",
    examples=(
        ("%ddp_fault duplicate-rank", "two processes have the same rank"),
        ("%ddp_fault", "the list of faults"),
        ("%ddp_fault --repair", "applies the remedy of the last one"),
    ),
    run=_fault,
    options=(
        Option(
            "name",
            "the fault; without it, the list",
            nargs="?",
            completer=one_of(fault_lab.names()),
        ),
        Option("--repair", "apply the remedy of the last fault"),
        Option("--show", "show what it changes, and do nothing"),
    ),
)


TOUR_TEXT = """\
Five things to try

  1  %ddp_init --world-size 4       four ranks; the board shows how they find each other
  2  %%ddp                          the cell runs on every rank:
     x = torch.ones(1) * rank
     dist.all_reduce(x)
     x
  3  %%ddp                          a hang: only rank 0 calls barrier. It ends by itself, 
     if rank == 0:                  with the rank, the line and the remedy; then %ddp_abort
         dist.barrier()
  4  %ddp_fault duplicate-rank      a setup that fails, explained; then %ddp_fault --repair
  5  %ddp_bench --max 4M            what an all_reduce costs on this machine

Every magic has a page of help (%ddp_init?), and Tab completes its options."""


TOUR = Verb(
    "ddp_tour",
    about="Print five things to try.",
    examples=(
        ("%ddp_tour", "five things to try"),
        ("%ddp_init?", "any magic's own page of help"),
    ),
    run=lambda ui, _args: ui.say(TOUR_TEXT),
)
