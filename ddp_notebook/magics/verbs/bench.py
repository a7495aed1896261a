"""`%ddp_bench`: what communication costs. `DDPMagics` inherits the verb."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.magic import line_magic

from ddp_notebook.bench.ops import OP_NAMES
from ddp_notebook.bench.plan import (
    DTYPE_BYTES,
    MODES,
    Plan,
    parse_bytes,
    parse_names,
    parse_seconds,
)
from ddp_notebook.bench.results import BenchRun
from ddp_notebook.bench.steps.results import StepBenchResult
from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics.verbs.bench_steps import (
    PAINT_EVERY_S,
    StepBenchVerb,
    add_step_options,
    wants_steps,
)
from ddp_notebook.model import Ranks
from ddp_notebook.session import Session
from ddp_notebook.session.options import BACKENDS, DEVICES
from ddp_notebook.session.tools.bench import BenchOptions
from ddp_notebook.session.tools.bench_result import BenchResult, check_export
from ddp_notebook.views.bench.live import live_bundle
from ddp_notebook.views.live_region import LiveRegion

if TYPE_CHECKING:
    from ddp_notebook.magics.parsing import Parser

_OF_COLLECTIVES = (
    *("ranks", "op", "min", "max", "step", "dtype", "mode", "world_sizes"),
    *("backend", "device", "tune", "export", "baseline"),
)
_CPU_MAX, _GPU_MAX = "64M", "1G"
"""The largest size by default: 64 MiB take some 40 ms on gloo, 1 GiB about as long on NVLink."""


def bench_parser() -> Parser:
    """The parser of `%ddp_bench`."""
    from ddp_notebook.magics.parsing import Parser, with_ranks  # which know all verbs

    description = "Measure what collectives cost against tensor size, on all ranks."
    parser = with_ranks(Parser("%ddp_bench", "%ddp_bench --max 64M", description))
    add = parser.add_argument
    add("--op", default="all_reduce", help=f"of {','.join(OP_NAMES)} (default all_reduce)")
    add("--min", default="auto", help="smallest size: 4K (default 4 bytes, or one element)")
    add("--max", default="auto", help=f"largest size (default {_CPU_MAX}, on GPUs {_GPU_MAX})")
    add("--step", type=int, default=2, help="each size is so many times the last (default 2)")
    add("--dtype", default="float32", help=f"of {','.join(DTYPE_BYTES)} (default float32)")
    add("--mode", default="blocking", help="blocking: one at a time; pipelined: several under way")
    add("--world-sizes", default="", help="how many ranks take part: 2,4 for the first 2, then 4")
    add("--backend", choices=BACKENDS, default="auto", help="default: the session's")
    add("--device", choices=DEVICES, default="auto", help="default: the session's")
    add("--budget", default="15s", help="how long it may take (default 15s)")
    add("--tune", action="store_true", help="before and after SCHED_BATCH on gloo's loop thread")
    add("--export", default="", help="a file to write: .json .csv .txt .nccl.json .png .svg .pdf")
    add("--baseline", default="", help="a .json that was exported, to compare with")
    add_step_options(parser)
    return parser


class BenchVerb(StepBenchVerb):
    """The verb, for the class of all verbs to inherit."""

    shell: Any
    session: Session
    _has_front_end: bool

    if TYPE_CHECKING:

        def _verb(self, name: str, line: str, act: Callable[[argparse.Namespace], Any]) -> Any: ...

        def _say(self, text: str) -> None: ...

        def _ranks(self, args: argparse.Namespace) -> Ranks | None: ...

        def _require_ranks(self, verb: str) -> None: ...

    @line_magic
    def ddp_bench(self, line: str) -> BenchResult | StepBenchResult | None:
        """What collectives cost against tensor size: %ddp_bench [--op broadcast] [--max 64M]

        Or the training steps of a model: %ddp_bench --model net --batch 8,16,32
        """
        return self._verb("ddp_bench", line, self._bench)

    def _bench(self, args: argparse.Namespace) -> BenchResult | StepBenchResult:
        self._require_ranks("%ddp_bench")
        if wants_steps(args):
            _check_all_are_about_steps(args)
            return self._bench_steps(args)
        plan = _plan(args, on_gpu=self._on_gpu(args.device))
        problem = check_export(args.export) if args.export else ""
        if problem:
            raise UsageMistake(problem)
        baseline = BenchResult.read(args.baseline) if args.baseline else None
        options = BenchOptions(self._ranks(args), args.backend, args.device, baseline)
        painting = _Painting(plan)
        region = LiveRegion(self.shell.display_pub, painting.bundle, PAINT_EVERY_S)

        def watch(done: float, so_far: Callable[[], BenchRun]) -> None:
            painting.done, painting.so_far = done, so_far
            region.nudge()

        if self._has_front_end:
            region.open()
        try:
            result = self.session.bench(plan, options, watch)
        finally:
            region.close({"text/plain": ""})
        if args.export:
            self._say(result.save(args.export))
        return result

    def _on_gpu(self, device: str) -> bool:
        return device != "cpu" and "cuda" in str(self.session.bench_device)


def _check_all_are_about_steps(args: argparse.Namespace) -> None:
    """Raises UsageMistake when an option is about collectives alone."""
    defaults = bench_parser().parse_args([])
    for name in _OF_COLLECTIVES:
        if getattr(args, name) != getattr(defaults, name):
            option = "--" + name.replace("_", "-")
            raise UsageMistake(
                f"{option} is for collectives, and this measures training steps: leave {option} "
                "out, or --model, --batch and what goes with them."
            )


class _Painting:
    """What is to be shown of a run that goes on. Asked by the painter's thread."""

    def __init__(self, plan: Plan) -> None:
        self.done = 0.0
        self.so_far: Callable[[], BenchRun] | None = None
        self._plan = plan
        self._started = time.monotonic()

    def bundle(self) -> dict[str, str]:
        """The MIME bundle of this moment."""
        left_s = self._plan.budget_s - (time.monotonic() - self._started)
        run = self.so_far() if self.so_far is not None else None
        return live_bundle(run, self.done, max(left_s, 0.0) if left_s > 0 else None)


def _plan(args: argparse.Namespace, *, on_gpu: bool) -> Plan:
    """The plan that the options write. Raises UsageMistake."""
    try:
        dtypes = parse_names(args.dtype, tuple(DTYPE_BYTES), "dtype")
        least = max(4, *(DTYPE_BYTES[dtype] for dtype in dtypes))
        most = _GPU_MAX if on_gpu else _CPU_MAX
        return Plan(
            ops=parse_names(args.op, OP_NAMES, "operation"),
            dtypes=dtypes,
            modes=parse_names(args.mode, MODES, "mode"),
            world_sizes=_world_sizes(args.world_sizes),
            tune=args.tune,
            min_bytes=least if args.min == "auto" else parse_bytes(args.min),
            max_bytes=parse_bytes(most if args.max == "auto" else args.max),
            factor=args.step,
            budget_s=parse_seconds(args.budget),
        )
    except ValueError as error:
        raise UsageMistake(str(error)) from None


def _world_sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"--world-sizes {text!r}: write numbers of ranks, such as 2,4.")
    return tuple(sorted({int(part) for part in parts}))
