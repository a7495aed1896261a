"""`%ddp_bench`: what communication costs, in collectives or in the training steps of a model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from ddp_notebook.bench.plan import (
    DTYPE_BYTES,
    MODES,
    OP_NAMES,
    Plan,
    parse_bytes,
    parse_names,
    parse_seconds,
)
from ddp_notebook.bench.result import BenchRun
from ddp_notebook.bench.steps import StepBenchResult, StepPlan, parse_batches, parse_buckets
from ddp_notebook.errors import UsageMistake
from ddp_notebook.magics import options
from ddp_notebook.magics.options import files, list_of
from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.ui import NotebookUi, chosen_ranks
from ddp_notebook.magics.verb import Verb
from ddp_notebook.session.options import BACKENDS, DEVICES
from ddp_notebook.session.tools.bench import BenchOptions
from ddp_notebook.session.tools.bench_result import BenchResult, check_export, save_steps
from ddp_notebook.views import bench as view

_CPU_MAX, _GPU_MAX = "64M", "1G"
"""The largest size by default: 64 MiB take some 40 ms on gloo, 1 GiB about as long on NVLink."""

_COLLECTIVE_OPTIONS = (
    Option(
        "--op NAMES",
        f"of {', '.join(OP_NAMES)}; several with commas",
        default="all_reduce",
        completer=list_of(OP_NAMES),
    ),
    Option(
        "--min SIZE", "smallest size, such as 4K (default: 4 bytes, or one element)", default="auto"
    ),
    Option(
        "--max SIZE",
        f"largest size, such as 256M (default: {_CPU_MAX}, on GPUs {_GPU_MAX})",
        default="auto",
    ),
    Option("--step N", "each size is N times the one before", default=2),
    Option(
        "--dtype NAMES",
        f"of {', '.join(DTYPE_BYTES)}; several with commas",
        default="float32",
        completer=list_of(DTYPE_BYTES),
    ),
    Option(
        "--mode NAMES",
        "blocking: one at a time; pipelined: several in flight; or blocking,pipelined for each",
        default="blocking",
        completer=list_of(MODES),
    ),
    Option("--world-sizes SIZES", "how many ranks take part: 2,4 for the first two, then four"),
    Option("--backend", "default: the session's", choices=BACKENDS),
    Option("--device", "default: the session's", choices=DEVICES),
    Option("--baseline FILE", "show a .json that was exported beside it", completer=files),
)
_STEP_OPTIONS = (
    Option(
        "--model MODEL",
        "measure training steps of a model on the ranks, of a function that makes one, or of cnn, "
        "mlp, transformer (default: cnn, when another of these options is given)",
        type=str,
    ),
    Option(
        "--batch SIZES",
        "batch sizes per rank, such as 8,16,32 (default 4,8,16,32,64,128)",
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
)
"""With any of these options `%ddp_bench` measures training steps."""
_STEP_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    **{name: (name, str) for name in ("model", "loss", "data")},
    "batch": ("batches", parse_batches),
    "bucket_mb": ("buckets", parse_buckets),
}
"""The fields of a plan by the options that give them, and how they are read."""


def wants_steps(args: argparse.Namespace) -> bool:
    """Return True when one of the options for training steps was given."""
    return any(getattr(args, option.attribute) != option.default for option in _STEP_OPTIONS)


def _bench(ui: NotebookUi, args: argparse.Namespace) -> BenchResult | StepBenchResult:
    ui.session.pool.need("%ddp_bench")
    if wants_steps(args):
        return _training_steps(ui, args)
    # The default of --max depends on the device: 64 MiB on gloo takes as long as 1 GiB on NVLink.
    plan = _plan(args, on_gpu=args.device != "cpu" and "cuda" in ui.session.benchmarks.device)
    problem = check_export(args.export) if args.export else ""
    if problem:
        raise UsageMistake(problem)
    baseline = BenchResult.read(args.baseline) if args.baseline else None
    wanted = BenchOptions(chosen_ranks(ui.session, args), args.backend, args.device, baseline)

    # Text and a bar only: drawing a figure takes a core from the ranks that are measured.
    def render(run: BenchRun | None, done: float, elapsed_s: float) -> Mapping[str, str]:
        left_s = plan.budget_s - elapsed_s
        return view.live(run, done, left_s if left_s > 0 else None)

    with ui.output.progress(render) as watch:
        result = ui.session.bench(plan, wanted, watch)
    if args.export:
        ui.say(result.save(args.export))
    return result


def _plan(args: argparse.Namespace, *, on_gpu: bool) -> Plan:
    """Return the plan that the options describe. Raises UsageMistake."""
    sizes = [size.strip() for size in args.world_sizes.split(",") if size.strip()]
    try:
        if not all(size.isdigit() and int(size) for size in sizes):
            raise ValueError(
                f"--world-sizes {args.world_sizes!r}: write numbers of ranks, such as 2,4."
            )
        dtypes = parse_names(args.dtype, tuple(DTYPE_BYTES), "dtype")
        smallest = max(4, *(DTYPE_BYTES[dtype] for dtype in dtypes))
        largest = _GPU_MAX if on_gpu else _CPU_MAX
        return Plan(
            ops=parse_names(args.op, OP_NAMES, "operation"),
            dtypes=dtypes,
            modes=parse_names(args.mode, MODES, "mode"),
            world_sizes=tuple(sorted(set(map(int, sizes)))),
            min_bytes=smallest if args.min == "auto" else parse_bytes(args.min),
            max_bytes=parse_bytes(largest if args.max == "auto" else args.max),
            factor=args.step,
            budget_s=parse_seconds(args.budget),
        )
    except ValueError as error:
        raise UsageMistake(str(error)) from None


def _training_steps(ui: NotebookUi, args: argparse.Namespace) -> StepBenchResult:
    for option in _COLLECTIVE_OPTIONS:
        if getattr(args, option.attribute) != option.default:
            name = option.names[0]
            raise UsageMistake(
                f"{name} is for collectives, and this call measures training steps: leave out "
                f"{name}, or --model, --batch and the other options of training steps."
            )
    try:
        given = {
            field: read(value)
            for option, (field, read) in _STEP_FIELDS.items()
            if (value := getattr(args, option)) is not None
        }
        plan = StepPlan(budget_s=parse_seconds(args.budget), **given)
    except ValueError as error:
        raise UsageMistake(str(error)) from None
    if args.export and (problem := check_export(args.export)):
        raise UsageMistake(problem)

    prepared_s = 0.0

    # The budget begins when the model is prepared.
    def render(result: StepBenchResult | None, done: float, elapsed_s: float) -> Mapping[str, str]:
        nonlocal prepared_s
        if not done:
            prepared_s = elapsed_s
            return view.live_steps(plan.model, result, done, None, elapsed_s)
        left_s = plan.left_s(elapsed_s - prepared_s, done)
        return view.live_steps(plan.model, result, done, left_s)

    with ui.output.progress(render) as watch:
        result = ui.session.bench_steps(plan, watch, chosen_ranks(ui.session, args))
    if args.export:
        ui.say(save_steps(result, args.export))
    return result


BENCH = Verb(
    "ddp_bench",
    about="Measure what collectives cost against tensor size, on all ranks; or the training steps "
    "of a model. Returns a BenchResult: figure, table, what they mean and how far to trust them; "
    "of training steps, a StepBenchResult.",
    examples=(
        ("%ddp_bench --max 64M", "all_reduce from 4 bytes up, in about 15 s"),
        ("%ddp_bench --op broadcast,all_gather --max 4M", "other collectives, smaller"),
        ("%ddp_bench --model cnn --batch 8,32,128", "training steps at three batch sizes"),
    ),
    run=_bench,
    options=(
        options.ranks("measure these ranks only"),
        *_COLLECTIVE_OPTIONS,
        Option(
            "--export FILE",
            "write the result to FILE: .json .csv .nccl.json .svg .png .pdf",
            completer=files,
        ),
        Option("--budget TIME", "how long it may take, such as 30s or 2m", default="15s"),
        *_STEP_OPTIONS,
    ),
)
