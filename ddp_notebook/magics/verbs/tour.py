"""`%ddp_tour`: five things to try."""

from __future__ import annotations

import argparse

from ddp_notebook.magics.ui import NotebookUi
from ddp_notebook.magics.verb import Verb

TOUR_TEXT = """\
Five things to try

  1  %ddp_init --world-size 4       four ranks; the board shows how they find each other
  2  %%ddp                          the cell runs on every rank:
     x = torch.ones(1) * rank
     dist.all_reduce(x)
     x
  3  %%ddp                          a hang: rank 0 alone calls barrier. It ends by itself,
     if rank == 0:                  with the rank, the line and the remedy; then %ddp_abort
         dist.barrier()
  4  %ddp_fault duplicate-rank      a setup that fails, explained; then %ddp_fault --repair
  5  %ddp_bench --max 4M            what an all_reduce costs on this machine

Every magic has a page of help (%ddp_init?), and Tab completes its options."""


def _tour(ui: NotebookUi, _args: argparse.Namespace) -> None:
    ui.say(TOUR_TEXT)


TOUR = Verb(
    "ddp_tour",
    about="Print five things to try.",
    examples=(
        ("%ddp_tour", "five things to try"),
        ("%ddp_init?", "any magic's own page of help"),
    ),
    run=_tour,
)
