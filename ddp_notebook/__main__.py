"""The console script: `ddp-notebook demo` opens the tutorial, `ddp-notebook doctor` looks whether
DDP can work here."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_notebook.errors import UsageMistake
from ddp_notebook.session.options import BACKENDS

_CELL_TIMEOUT_S = 300
_KERNELS_TRIED = 3
_SECTIONS = {"board": "Board", "accuracy": "Accuracy", "all_reduce": "all_reduce"}
"""The tags of the tutorial's cells whose outputs the headless demo prints, and their titles."""
_WIDTH = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments`; its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console that has no box drawing
    parser = _parser()
    args, unknown = parser.parse_known_args(arguments)
    if args.command is None:
        parser.print_help()
        return 2
    opens_jupyter = args.command == "demo" and not args.headless
    if unknown and not opens_jupyter:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return _doctor(args) if args.command == "doctor" else _demo(args, unknown)
    except UsageMistake as mistake:
        print(f"ddp-notebook: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddp-notebook",
        description="Tools of ddp_notebook, the debugger for DDP in Jupyter.",
        allow_abbrev=False,
    )
    version = f"ddp-notebook {metadata.version('ddp-notebook')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_demo(commands)
    _add_doctor(commands)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="open the tutorial in JupyterLab, or run it with --headless",
        description="Copy the tutorial into a folder and open it in JupyterLab. "
        "Options that are not listed here go to JupyterLab.",
        allow_abbrev=False,
    )
    demo.add_argument(
        "--dir",
        type=Path,
        default=Path("ddp-notebook-demo"),
        help="where the notebooks go; what is there already is kept (default ./ddp-notebook-demo)",
    )
    demo.add_argument(
        "--headless",
        action="store_true",
        help="run the tutorial here, without a browser, and print what it found",
    )
    demo.add_argument("--no-browser", action="store_true", help="start JupyterLab, open no browser")


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="look whether DDP can work here, and say what to do if not",
        description="Look whether DDP can work here, before anything starts. "
        "The exit code is 1 when it cannot.",
        allow_abbrev=False,
    )
    add = doctor.add_argument
    add("-n", "--world-size", type=int, default=4, help="number of ranks (default 4)")
    add("--backend", choices=BACKENDS, default="auto", help="the one you mean to use (auto)")
    add("--master-port", type=int, default=0, help="a port to look at (default: MASTER_PORT)")
    add("--json", action="store_true", help="print it as JSON")


def _doctor(args: argparse.Namespace) -> int:
    from ddp_notebook.doctor import examine
    from ddp_notebook.views import doctor

    report = examine(
        args.world_size,
        backend=args.backend,
        master_port=args.master_port,
        command="ddp-notebook doctor",
    )
    print(json.dumps(report.to_json(), indent=2) if args.json else doctor.text(report))
    return 0 if report.ok else 1


def _demo(args: argparse.Namespace, for_jupyter: Sequence[str]) -> int:
    needed = ("nbclient", "nbformat") if args.headless else ("jupyterlab",)
    _require(*needed, "sklearn")
    tutorial = copy_notebooks(args.dir)[0]
    if args.headless:
        return _run_headless(tutorial)
    options = ["--no-browser"] if args.no_browser else []
    # In this process, so that Control-C is JupyterLab's to handle.
    import_module("jupyterlab.labapp").main([str(tutorial), *options, *for_jupyter])
    return 0


def _require(*modules: str) -> None:
    """Raises UsageMistake, with the command to type, when one of `modules` is not installed."""
    distributions = {"sklearn": "scikit-learn"}
    missing = [distributions.get(name, name) for name in modules if find_spec(name) is None]
    if missing:
        raise UsageMistake(
            f"The demo needs {' and '.join(missing)}, which this Python does not have. "
            f'Type: {sys.executable} -m pip install "ddp-notebook[demo]"'
        )


def copy_notebooks(folder: Path) -> list[Path]:
    """Copy the notebooks into `folder`, keep what is there, and say so; the copies, in order.

    What goes with them, the solutions and the instructor's guide, is copied without a word.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageMistake(f"{folder} is a file. Name a folder: ddp-notebook demo --dir my-demo")
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for source in sorted(_notebooks_folder().glob("*.ipynb")):
        copy = folder / source.name
        if copy.exists():
            print(f"{copy} is there already and is kept.")
        else:
            shutil.copyfile(source, copy)
            print(f"{copy} written.")
        copies.append(copy)
    for source in sorted(_notebooks_folder().rglob("*.md")):
        copy = folder / source.relative_to(_notebooks_folder())
        copy.parent.mkdir(exist_ok=True)
        if not copy.exists():
            shutil.copyfile(source, copy)
    return copies


def _notebooks_folder() -> Path:
    """Inside the package when it is installed; beside it in a checkout."""
    package = Path(__file__).resolve().parent
    folders = (package / "_notebooks", package.parent / "notebooks")
    found = next((folder for folder in folders if any(folder.glob("*.ipynb"))), None)
    if found is None:
        raise UsageMistake(
            "The tutorial notebooks are not in this installation. Install the package again: "
            f"{sys.executable} -m pip install --force-reinstall --no-deps ddp-notebook"
        )
    return found


# --------------------------------------------------------------------------- without a browser


def _run_headless(tutorial: Path) -> int:
    """Execute `tutorial`, print its main results, write it with its outputs beside it."""
    import nbformat
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(tutorial, as_version=4)
    print(f"\nRunning {tutorial.name}:\n")
    started = time.monotonic()
    failure = ""
    try:
        _execute(notebook, tutorial.parent)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        failure = str(error).strip()
    executed = tutorial.with_suffix(".executed.ipynb")
    nbformat.write(notebook, executed)
    for tag, title in _SECTIONS.items():
        print(f"\n── {title} {'─' * (_WIDTH - len(title) - 4)}\n")
        print("\n\n".join(tagged_outputs(notebook, tag)) or "(nothing: the cell was not reached)")
    print(f"\nThe notebook with all its outputs: {executed}")
    elapsed_s = time.monotonic() - started
    if failure:
        print(f"\n{failure}", file=sys.stderr)
        print(f"\nFAILED after {elapsed_s:.0f} s: a cell did not do what it claims.")
        return 1
    print(f"\nEvery claim of the tutorial held. It took {elapsed_s:.0f} s.")
    return 0


def _execute(notebook: Any, folder: Path) -> None:
    """Execute all cells, with a line for each. Raises what nbclient and `_kernel` raise."""
    total = sum(cell.cell_type == "code" for cell in notebook.cells)
    number = 0
    with _kernel(notebook, folder) as client:
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            number += 1
            began_s = time.monotonic()
            client.execute_cell(cell, index)
            spent_s = time.monotonic() - began_s
            print(f"{number:4} of {total} {spent_s:6.1f} s  {_gist(cell.source)}", flush=True)


@contextlib.contextmanager
def _kernel(notebook: Any, folder: Path) -> Iterator[Any]:
    """nbclient's client for a notebook, with its kernel. Raises UsageMistake: it does not start.

    Another kernel is started for one that dies before it answers, as Jupyter's server does: its
    ports were free when they were chosen, and another program may take one until it binds them.
    """
    from nbclient import NotebookClient

    with contextlib.ExitStack() as until_the_end:
        for tries_left in reversed(range(_KERNELS_TRIED)):
            client = NotebookClient(
                notebook,
                timeout=_CELL_TIMEOUT_S,
                kernel_name="python3",
                resources={"metadata": {"path": str(folder)}},
                # Its warning about encryption is for kernels on other hosts.
                extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
            )
            try:
                until_the_end.enter_context(client.setup_kernel())
                break
            except RuntimeError as error:
                if not tries_left:
                    raise UsageMistake(
                        f"The notebook's kernel did not start: {error}. "
                        f"This says why: {sys.executable} -m ipykernel_launcher"
                    ) from error
        yield client


def _gist(source: str) -> str:
    """A cell in a few words: its magic, or its first line, and the line after the magic."""
    lines = [line.strip() for line in source.splitlines() if line.strip()] or [""]
    gist = " · ".join(lines[:2]) if lines[0].startswith("%%") else lines[0]
    return gist if len(gist) <= _WIDTH else gist[: _WIDTH - 1] + "…"


def tagged_outputs(notebook: Any, tag: str) -> Iterator[str]:
    """What the cells tagged `tag` have shown as text, one piece per output.

    One-line displays are left out: they say how long it took, or how far it is.
    """
    for cell in notebook.cells:
        if cell.cell_type != "code" or tag not in cell.metadata.get("tags", ()):
            continue
        for output in cell.outputs:
            if output.output_type == "stream":
                yield output.text.strip("\n")
            elif "image/png" not in output.get("data", {}):
                text = output.get("data", {}).get("text/plain", "")
                if "\n" in text:
                    yield text.strip("\n")


if __name__ == "__main__":
    sys.exit(main())
