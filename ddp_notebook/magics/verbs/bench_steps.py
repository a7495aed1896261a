"""`%ddp_bench --model net`: what a training step costs; its part of the verb."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from ddp_notebook.bench.plan import parse_seconds
from ddp_notebook.bench.steps.plan import StepPlan, parse_batches, parse_buckets
from ddp_notebook.bench.steps.results import StepBenchResult
from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.ui import NotebookUi
from ddp_notebook.session.options import MAX_WORLD_SIZE
from ddp_notebook.views.bench.live import live_steps

STEP_OPTIONS = (
    Option(
        "--model MODEL",
        "measure training steps of a model on the ranks, of a function that makes one, or of cnn, "
        "mlp, transformer (default: cnn, when another of these options is given)",
        type=str,
    ),
    Option(
        "--batch SIZES",
        "batch sizes per rank, such as 8,16,32 (default 8,32,128)",
        type=str,
    ),
    Option(
        "--bucket-mb SIZES",
        "bucket sizes, such as 1,5,25,default (default: default, which is DDP's own)",
        type=str,
    ),
    Option("--loss LOSS", "a function of output and target, on the ranks", type=str),
    Option(
        "--data DATA",
        "samples on the ranks: (inputs, targets), a Dataset, ... (default: random ones that fit "
        "the first layer)",
        type=str,
    ),
    Option("--predict", "also estimate steps at another number of ranks"),
    Option(
        "--world-size N",
        "that number of ranks (default: twice as many)",
        type=int,
    ),
)
"""With any of these options `%ddp_bench` measures training steps."""


def given(args: argparse.Namespace, options: Iterable[Option]) -> list[Option]:
    """Those of `options` that do not have their default."""
    return [option for option in options if getattr(args, option.attribute) != option.default]


def wants_steps(args: argparse.Namespace) -> bool:
    """True when one of the options for training steps was given."""
    return bool(given(args, STEP_OPTIONS))


def bench_steps(ui: NotebookUi, args: argparse.Namespace) -> StepBenchResult:
    """Measure training steps, and show each result as a bar."""
    plan = _plan(args)
    predict_for = _predict_for(args, ui.session.record.snapshot.world_size)

    def render(result: StepBenchResult | None, done: float, elapsed_s: float) -> Mapping[str, str]:
        return live_steps(plan.model, result, done, elapsed_s)

    with ui.output.progress(render) as watch:
        return ui.session.bench_steps(plan, predict_for=predict_for, watch=watch)


def _predict_for(args: argparse.Namespace, running: int) -> int | None:
    """The number of ranks to estimate for; None without --predict. Raises UsageMistake."""
    if not args.predict:
        if args.world_size is not None:
            raise UsageMistake(
                "--world-size is the number of ranks that --predict estimates for; measured are "
                "the ranks that run. Type: "
                f"%ddp_bench --model {args.model or 'cnn'} --predict --world-size 8"
            )
        return None
    ranks: int = 2 * running if args.world_size is None else args.world_size
    if not 1 <= ranks <= MAX_WORLD_SIZE**2:
        raise UsageMistake(f"--world-size {ranks} is not a number of ranks, such as 8.")
    return ranks


def _plan(args: argparse.Namespace) -> StepPlan:
    """The plan that the options describe. Raises UsageMistake."""
    chosen: dict[str, Any] = {
        name: value
        for name in ("model", "loss", "data")
        if (value := getattr(args, name)) is not None
    }
    try:
        if args.batch is not None:
            chosen["batches"] = parse_batches(args.batch)
        if args.bucket_mb is not None:
            chosen["buckets"] = parse_buckets(args.bucket_mb)
        return StepPlan(budget_s=parse_seconds(args.budget), **chosen)
    except ValueError as error:
        raise UsageMistake(str(error)) from None
