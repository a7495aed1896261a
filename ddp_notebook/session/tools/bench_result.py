"""The result of `%ddp_bench`: the measurements, and methods to plot and export them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from ddp_notebook import files
from ddp_notebook.archive.replay import LARGEST_FILE
from ddp_notebook.bench.result import BenchRun
from ddp_notebook.bench.steps import StepBenchResult
from ddp_notebook.errors import UsageMistake, named_file
from ddp_notebook.model import codec, counted
from ddp_notebook.model.codec import DecodeError
from ddp_notebook.views import bench_export, bench_figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "ddp_notebook bench"
VERSION = 1
"""The version of the file's form; a file of another version is refused."""


class BenchResult(BenchRun):
    """The measurements. `curves` holds the numbers, `trust` says how reliable they are."""

    baseline: BenchRun | None = None
    """The saved run that is shown beside it; None for none."""

    @classmethod
    def of(cls, run: BenchRun, baseline: BenchRun | None = None) -> Self:
        """Return the result of `run`, without a `baseline` that has none of its curves."""
        made = cls(**{each.name: getattr(run, each.name) for each in fields(run)})
        why_not = ""
        keys = {curve.key for curve in run.curves}
        if baseline is not None and not keys & {curve.key for curve in baseline.curves}:
            why_not = "it has no operation, dtype, mode and number of ranks that was measured now"
        if why_not:
            # Nobody has it yet: until it is returned a frozen value may be completed.
            object.__setattr__(made, "notes", (f"No baseline is shown: {why_not}.", *made.notes))
        else:
            object.__setattr__(made, "baseline", baseline)
        return made

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Return the result that `save` wrote. Raises UsageMistake when it cannot be read."""
        source = named_file(path)
        try:
            with files.opened(source) as stream:
                data = stream.read(LARGEST_FILE + 1)
            if len(data) > LARGEST_FILE:
                raise UsageMistake(f"{source} is too large to be a result of %ddp_bench.")
            wire = codec.loads(data, of_others=True)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageMistake(
                f"{source} cannot be read: {why}. Write one first: %ddp_bench --export {path}"
            ) from None
        if not isinstance(wire, dict) or wire.get("kind") != KIND:
            raise UsageMistake(
                f"{source} is not a result of %ddp_bench. Write one: %ddp_bench --export {path}"
            )
        if wire.get("version") != VERSION:
            raise UsageMistake(
                f"{source} has format version {wire.get('version')}, and this ddp_notebook reads "
                f"version {VERSION}. Measure again: %ddp_bench --export {path}"
            )
        try:
            return cls.of(codec.decode(BenchRun, wire["run"]))
        except (DecodeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise UsageMistake(f"{source} is damaged: {error}.") from None

    def plot(self) -> Figure:
        """Return a matplotlib figure: time and bandwidth against size."""
        return bench_figures.against_size(self, self.baseline)

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each size of each curve: what `dataframe` and `to_csv` hold."""
        return bench_export.rows(self)

    def dataframe(self) -> Any:
        """A pandas DataFrame, a row for each size. Raises UsageMistake where pandas is missing."""
        try:
            import pandas
        except ImportError:
            raise UsageMistake(
                "A dataframe needs pandas, which is not installed: pip install pandas. Without "
                "it: result.rows() is a list of dicts, result.to_csv(path) a file."
            ) from None
        return pandas.DataFrame(self.rows())

    def to_json(self, path: str | os.PathLike[str] | None = None, *, samples: bool = True) -> str:
        """Return all of it as JSON, written to `path` if there is one; `--baseline` reads it.

        Without `samples` the single iterations are left out.
        """
        run: BenchRun = self
        if not samples:
            curves = tuple(
                replace(curve, points=tuple(replace(p, samples=None) for p in curve.points))
                for curve in self.curves
            )
            run = replace(self, curves=curves)
        wire = {"kind": KIND, "version": VERSION, "run": codec.encode(run)}
        return _written(json.dumps(wire, allow_nan=False), path)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return a line for each size, written to `path` if there is one."""
        return _written(bench_export.csv(self.rows()), path)

    def to_nccl_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """nccl-tests' JSON (version 2) with its times per iteration."""
        return _written(json.dumps(bench_export.nccl_json(self)), path)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write it in the format of the file's extension; says what was written.

        ``.csv``; ``.nccl.json`` in nccl-tests' form; ``.png``, ``.svg`` and ``.pdf`` as a figure;
        else ``.json``. Raises UsageMistake when it cannot be written.
        """
        forms = {".csv": self.to_csv, ".nccl.json": self.to_nccl_json, ".json": self.to_json}
        return _save(path, f"{len(self.all_points)} sizes", self.plot, forms)


def save_steps(result: StepBenchResult, path: str | os.PathLike[str]) -> str:
    """Write training steps in the form of the name's ending, and say what was written.

    ``.csv`` and ``.json`` have a line or an object for each batch and bucket size, ``.nccl.json``
    a result as nccl-tests write it. Raises UsageMistake when it cannot be written.
    """
    rows = bench_export.step_rows(result)
    about = {"kind": f"{KIND} of training steps", "version": VERSION}
    wire = about | codec.encode(replace(result, points=())) | {"points": rows}
    forms: dict[str, Callable[[], str]] = {
        ".csv": partial(bench_export.csv, rows),
        ".nccl.json": BenchResult.of(bench_export.steps_as_run(result)).to_nccl_json,
        ".json": partial(json.dumps, wire),
    }
    draw = partial(bench_figures.against_batch, result)
    return _save(path, counted(len(rows), "point"), draw, forms)


def _save(
    path: str | os.PathLike[str],
    what: str,
    draw: Callable[[], Figure],
    forms: Mapping[str, Callable[[], str]],
) -> str:
    """Write a figure, or what the first of the `forms` returns that the name ends in."""
    if problem := check_export(path):
        raise UsageMistake(problem)
    target = named_file(path)
    name = target.name.lower()
    try:
        if name.endswith(_FIGURES):
            bench_figures.save(draw(), target)
            return f"the figure → {path}"
        _written(next(form() for end, form in forms.items() if name.endswith(end)), path)
    except OSError as error:
        raise UsageMistake(f"{path} cannot be written: {error}.") from None
    return f"{what} → {path}"


_FIGURES = (".png", ".svg", ".pdf")


def check_export(path: str | os.PathLike[str]) -> str:
    """Return why a result cannot be written to `path`; empty when it seems that it can."""
    target = named_file(path)
    endings = (".json", ".csv", *_FIGURES)
    if not target.name.lower().endswith(endings):
        return (
            f"--export {path}: the ending chooses the format; use {', '.join(endings)} "
            "(.nccl.json is nccl-tests' format)."
        )
    if not target.parent.is_dir():
        return f"--export {path}: folder {target.parent} does not exist."
    return ""


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        named_file(path).write_text(text + "\n", "utf-8")
    return text
