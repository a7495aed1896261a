"""`%ddp_wrap`: a model becomes a DistributedDataParallel, one visible stage at a time."""

from __future__ import annotations

import argparse

from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.ui import NotebookUi
from ddp_notebook.magics.verb import Verb
from ddp_notebook.model import StepTable
from ddp_notebook.session.tools.ddp_construction import WrapOptions


def _wrap(ui: NotebookUi, args: argparse.Namespace) -> StepTable:
    wanted = WrapOptions(
        step=args.step,
        buckets=args.buckets,
        bucket_cap_mb=args.bucket_cap_mb,
        find_unused_parameters=args.find_unused_parameters,
        target=args.target,
    )
    return ui.session.wrap(args.name, wanted).table


WRAP = Verb(
    "ddp_wrap",
    about="Take a model on the ranks through DDP's construction, stage by stage; show the buckets "
    "of one that is wrapped already. Returns a table of the stages.",
    examples=(
        ("%ddp_wrap model", "a model on the ranks becomes DDP, stage by stage"),
        ("%ddp_wrap model --buckets", "after a training step: the buckets, and why these"),
    ),
    run=_wrap,
    options=(
        Option(
            "name",
            "the variable that holds the model; with --buckets, the last one by default",
            nargs="?",
        ),
        Option("--step", "pause before each stage; %ddp_step continues"),
        Option(
            "--buckets",
            "after a training step: the order in which gradients became ready, and the buckets "
            "made of it",
        ),
        Option(
            "--bucket-cap-mb N", "size of a bucket in MiB (default 25, the first 1)", type=float
        ),
        Option(
            "--find-unused-parameters",
            "for models that do not use every parameter in every training step",
        ),
        Option(
            "--as NAME",
            "the variable for the result; the model stays as it is (default: the same)",
            dest="target",
        ),
    ),
)
