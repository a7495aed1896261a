"""`%ddp_bench --model net --batch 8,16,32`: the verb's part that is about training steps.

`DDPMagics` inherits it, and `%ddp_bench` calls it when one of its options is given.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from ddp_notebook.bench.plan import parse_seconds
from ddp_notebook.bench.steps.plan import StepPlan, parse_batches, parse_buckets
from ddp_notebook.bench.steps.results import StepBenchResult
from ddp_notebook.errors import UsageMistake
from ddp_notebook.session.options import MAX_WORLD_SIZE
from ddp_notebook.views.bench.live import live_steps
from ddp_notebook.views.live_region import LiveRegion

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp_notebook.magics.parsing import Parser
    from ddp_notebook.session import Session

PAINT_EVERY_S = 0.5
"""The ranks that are measured need the cores."""
_OWN = ("model", "loss", "data", "batch", "bucket_mb", "predict", "world_size")


def add_step_options(parser: Parser) -> None:
    """The options of `%ddp_bench` that make it measure training steps."""
    add = parser.add_argument
    add(
        "--model",
        default=None,
        help="measure training steps: a model on the ranks, a function that makes one, "
        "or cnn, mlp, transformer",
    )
    add("--batch", default=None, help="batch sizes per rank, such as 8,16,32 (8,32,128)")
    add("--bucket-mb", default=None, help="bucket sizes, such as 1,5,25,default (default)")
    add("--loss", default=None, help="a function on the ranks, of output and target")
    add("--data", default=None, help="samples on the ranks: (inputs, targets), a Dataset, ...")
    add("--predict", action="store_true", default=None, help="steps at another number of ranks")
    add("--world-size", type=int, default=None, help="that number (default: twice as many)")


def wants_steps(args: argparse.Namespace) -> bool:
    """True when one of the options for training steps was given."""
    return any(getattr(args, name) is not None for name in _OWN)


class StepBenchVerb:
    """The verb's part, for the class of all verbs to inherit."""

    session: Session
    shell: Any

    if TYPE_CHECKING:

        @property
        def _has_front_end(self) -> bool: ...

    def _bench_steps(self, args: argparse.Namespace) -> StepBenchResult:
        self.session.require("%ddp_bench")
        plan = _plan(args)
        predict_for = self._predict_for(args)
        painting = _Painting(plan.model)
        region = LiveRegion(self.shell.display_pub, painting.bundle, PAINT_EVERY_S)

        def watch(done: float, so_far: Callable[[], StepBenchResult]) -> None:
            painting.done, painting.so_far = done, so_far
            region.nudge()

        if self._has_front_end:
            region.open()
        try:
            return self.session.bench_steps(plan, predict_for=predict_for, watch=watch)
        finally:
            region.close({"text/plain": ""})

    def _predict_for(self, args: argparse.Namespace) -> int | None:
        if not args.predict:
            if args.world_size is not None:
                raise UsageMistake(
                    "--world-size is what --predict works out, and the ranks here are measured: "
                    f"%ddp_bench --model {args.model or 'cnn'} --predict --world-size 8"
                )
            return None
        ranks = args.world_size
        if ranks is None:
            ranks = 2 * self.session.record.snapshot.world_size
        if not 1 <= ranks <= MAX_WORLD_SIZE**2:
            raise UsageMistake(f"--world-size {ranks} is not a number of ranks, such as 8.")
        return int(ranks)


def _plan(args: argparse.Namespace) -> StepPlan:
    """What was asked for. Raises UsageMistake."""
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


class _Painting:
    """What is to be shown of steps that are measured. Asked by the painter's thread."""

    def __init__(self, what: str) -> None:
        self.done = 0.0
        self.so_far: Callable[[], StepBenchResult] | None = None
        self._what = what
        self._began_s = time.monotonic()

    def bundle(self) -> dict[str, str]:
        """The MIME bundle of this moment."""
        gone_s = time.monotonic() - self._began_s
        left_s = gone_s * (1 - self.done) / self.done if self.done else None
        result = self.so_far() if self.so_far is not None else None
        return live_steps(self._what, result, self.done, left_s)
