"""The console script `ddp-notebook`: demo and doctor here, the commands for jobs in `jobs`.

The packages that only the demo needs (nbclient, nbformat, JupyterLab) are imported where they are
used: they are an extra, and may not be installed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from ddp_notebook import book
from ddp_notebook.doctor import examine
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import commandline
from ddp_notebook.model import counted
from ddp_notebook.session.options import BACKENDS
from ddp_notebook.views import doctor as doctor_view

WRONG_USAGE = 3
"""The exit code; 0 is no problem, 1 a finding, 2 undecided."""
_SECTIONS = {
    "board": "Board",
    "hang": "Hang",
    "accuracy": "Accuracy",
    "all_reduce": "all_reduce",
    "steps": "Training steps",
}
"""Tags of the tutorial's cells whose outputs the headless demo prints, and the titles for them."""
_WIDTH = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments`, by default sys.argv's; the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the console may lack box drawing
    parser = _parser()
    args, unknown = parser.parse_known_args(arguments)
    if args.command is None:
        parser.print_help()
        return WRONG_USAGE
    # Unknown options of the demo are JupyterLab's: --port, --ip, ...
    if unknown and (args.command != "demo" or args.headless):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        if args.command == "demo":
            return _demo(args, unknown)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except UsageMistake as mistake:
        print(f"ddp-notebook: {mistake}", file=sys.stderr)
        return WRONG_USAGE
    except BrokenPipeError:  # who reads has enough, as `head` has; Python flushes once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as of a program that SIGPIPE ends
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ddp-notebook",
        description="Tools of ddp_notebook, the debugger for DDP in Jupyter.",
        allow_abbrev=False,
    )
    version = f"ddp-notebook {metadata.version('ddp-notebook')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
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
        help="folder for the notebooks; existing ones are kept (default ./ddp-notebook-demo)",
    )
    demo.add_argument(
        "--headless",
        action="store_true",
        help="run the tutorial here, without a browser, and print its main results",
    )
    demo.add_argument("--no-browser", action="store_true", help="start JupyterLab, open no browser")
    demo.add_argument(
        "--at", type=int, default=1, metavar="N", help="open notebook N, such as 5 (default 1)"
    )
    demo.add_argument(
        "--no-solutions", action="store_true", help="for a class: leave out solutions and guide"
    )
    doctor = commands.add_parser(
        "doctor",
        help="check whether DDP can work here, and how to fix what is wrong",
        description="Check whether DDP can work here, before anything starts. "
        "The exit code is 1 when it cannot.",
        allow_abbrev=False,
    )
    add = doctor.add_argument
    add("-n", "--world-size", type=int, default=4, help="number of ranks (default 4)")
    add("--backend", choices=BACKENDS, default="auto", help="the backend you want to use (auto)")
    add("--master-port", type=int, default=0, help="a port to check (default: MASTER_PORT)")
    add("--json", action="store_true", help="print it as JSON")
    doctor.set_defaults(run=_doctor)
    commandline.add(commands)
    book.add(commands, _notebooks_folder)
    return parser


class _Parser(argparse.ArgumentParser):
    """Ends with the exit code of all wrong usage: argparse's own, 2, stands for undecided."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(WRONG_USAGE, f"{self.prog}: {message}\n")


def _doctor(args: argparse.Namespace) -> int:
    report = examine(
        args.world_size,
        backend=args.backend,
        master_port=args.master_port,
        command="ddp-notebook doctor",
    )
    print(json.dumps(report.to_json(), indent=2) if args.json else doctor_view.text(report))
    return 0 if report.ok else 1


def _demo(args: argparse.Namespace, for_jupyter: Sequence[str]) -> int:
    needed = ("nbclient", "nbformat") if args.headless else ("jupyterlab",)
    packages = {"sklearn": "scikit-learn"}
    missing = [packages.get(n, n) for n in (*needed, "sklearn") if find_spec(n) is None]
    if missing:
        raise UsageMistake(
            f"The demo needs {' and '.join(missing)}, which this Python does not have. "
            f'Type: {sys.executable} -m pip install "ddp-notebook[demo]"'
        )
    copies = copy_notebooks(args.dir, solutions=not args.no_solutions)
    if not 1 <= args.at <= len(copies):
        raise UsageMistake(f"There is no notebook {args.at}: --at takes 1 to {len(copies)}.")
    tutorial = copies[args.at - 1]
    if args.headless:
        return _run_headless(tutorial)
    from jupyterlab.labapp import LabApp

    options = [
        str(tutorial),
        # The address that is printed, for a browser elsewhere, opens the tutorial as well.
        f"--LabApp.default_url=/lab/tree/{tutorial.name}",
        f"--LabApp.workspaces_dir={_layout(args.dir)}",
        "--ServerApp.answer_yes=True",  # Control-C ends it, and asks nothing
        "--ServerApp.log_level=ERROR",  # thirty lines would bury ours
        "--LabApp.log_level=ERROR",
    ]
    options += ["--no-browser"] if args.no_browser else []
    # In a container one is root; it listens on this host only, and asks for a token.
    options += ["--allow-root"] if os.geteuid() == 0 else []
    # In this process and not a child, so that JupyterLab handles Control-C.
    server = LabApp.initialize_server([*options, *for_jupyter])

    def tell() -> None:
        print(f"Open {server.public_url}  (Ctrl-C ends it)", flush=True)
        server.log.setLevel(logging.ERROR)

    # JupyterLab would ask whether it may fetch news, in a box that lies over the board.
    def without_news(_handler: object, page: dict[str, Any]) -> dict[str, Any]:
        disabled = page.get("disabledExtensions", [])
        return {**page, "disabledExtensions": [*disabled, _NEWS]}

    server.web_app.settings["page_config_hook"] = without_news
    server.log.setLevel(logging.CRITICAL + 1)  # as which it says where it is, in six lines
    server.io_loop.add_callback(tell)
    server.start()
    return 0


_NEWS = "@jupyterlab/apputils-extension:announcements"
_LAYOUT = {
    "data": {
        "layout-restorer:data": {
            "left": {"collapsed": True, "visible": True, "widgets": ["filebrowser"]},
            "relativeSizes": [0, 1, 0],
        }
    },
    "metadata": {"id": "default"},
}
"""JupyterLab's workspace at first: the list of files is folded, so that a board has room."""


def _layout(folder: Path) -> Path:
    """Return the folder in which JupyterLab keeps what is open; with `_LAYOUT`, if it is new."""
    workspaces = folder.resolve() / ".workspaces"
    if not workspaces.exists():
        from jupyterlab_server.workspaces_handler import WorkspacesManager

        WorkspacesManager(str(workspaces)).save("default", json.dumps(_LAYOUT))
    return workspaces


def copy_notebooks(folder: Path, *, solutions: bool = True) -> list[Path]:
    """Copy the notebooks into `folder` and say so; the copies in order. Keeps existing ones.

    Their drawings, the reference, the solutions and the instructor's guide are copied along without
    a line printed, the last two if `solutions`.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageMistake(f"{folder} is a file. Name a folder: ddp-notebook demo --dir my-demo")
    folder.mkdir(parents=True, exist_ok=True)
    package = _notebooks_folder()
    notebooks = sorted(package.glob("*.ipynb"))
    # A learner's own work in an existing copy is never overwritten.
    pages = sorted((*package.glob("*.md"), *package.glob("images/*.svg")))
    if solutions:
        pages += sorted(package.glob("solutions/*.md"))
    else:
        pages.remove(package / "INSTRUCTOR.md")
    kept = 0
    for source in (*notebooks, *pages):
        copy = folder / source.relative_to(package)
        copy.parent.mkdir(exist_ok=True)
        if copy.exists():
            kept += source in notebooks
        else:
            shutil.copyfile(source, copy)
    print(
        f"{counted(len(notebooks), 'notebook')} in {folder}"
        + f", {kept} kept as they were" * bool(kept)
    )
    return [folder / source.name for source in notebooks]


def _notebooks_folder() -> Path:
    """Inside the package when it is installed; beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_notebooks", package.parent / "notebooks"):
        if any(folder.glob("*.ipynb")):
            return folder
    raise UsageMistake(
        "The tutorial notebooks are not in this installation. Install the package again: "
        f"{sys.executable} -m pip install --force-reinstall --no-deps ddp-notebook"
    )


# --------------------------------------------------------------------------- without a browser


def _run_headless(tutorial: Path) -> int:
    """Execute `tutorial`, print its main results, and save it with its outputs beside it."""
    import nbformat
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(tutorial, as_version=4)
    print(f"\nRunning {tutorial.name}:\n")
    started = time.monotonic()
    failure = ""
    try:
        code = [(i, cell) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
        with _kernel(notebook, tutorial.parent) as client:
            for number, (index, cell) in enumerate(code, 1):
                began_s = time.monotonic()
                client.execute_cell(cell, index)
                took_s = time.monotonic() - began_s
                # A cell in one line: its first line, and the second when the first is a magic.
                lines = [*filter(None, map(str.strip, cell.source.splitlines())), ""]
                is_magic = lines[0].startswith("%%")
                gist = " · ".join(filter(None, lines[:2])) if is_magic else lines[0]
                gist = gist if len(gist) <= _WIDTH else gist[: _WIDTH - 1] + "…"
                print(f"{number:4} of {len(code)} {took_s:6.1f} s  {gist}", flush=True)
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
        print(f"\nFAILED after {elapsed_s:.0f} s: a cell of the tutorial raised an error.")
        return 1
    print(f"\nAll cells of the tutorial succeeded, in {elapsed_s:.0f} s.")
    return 0


@contextlib.contextmanager
def _kernel(notebook: Any, folder: Path) -> Iterator[Any]:
    """nbclient's client for a notebook, with its kernel. Raises UsageMistake if none starts.

    A kernel that dies before it answers is replaced, as Jupyter's server does: another program may
    take one of its ports after they were chosen and before the kernel binds them.
    """
    from nbclient import NotebookClient

    with contextlib.ExitStack() as stack:
        for tries_left in reversed(range(3)):
            client = NotebookClient(
                notebook,
                timeout=300,
                kernel_name="python3",
                resources={"metadata": {"path": str(folder)}},
                # Suppress its warning about encryption, which is for kernels on other hosts.
                extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
            )
            try:
                stack.enter_context(client.setup_kernel())
                break
            except RuntimeError as error:
                if not tries_left:
                    raise UsageMistake(
                        f"The notebook's kernel did not start: {error}. "
                        f"See why: {sys.executable} -m ipykernel_launcher"
                    ) from error
        yield client


def tagged_outputs(notebook: Any, tag: str) -> Iterator[str]:
    """The text outputs of the cells tagged `tag`.

    Displays of one line are left out: they only show progress or how long it took.
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
