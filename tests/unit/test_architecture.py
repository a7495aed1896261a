"""The house rules that no linter knows."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import ddp_notebook

PACKAGE = Path(ddp_notebook.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported_by(code: str) -> set[str]:
    """The modules that a fresh Python has loaded after running `code`."""
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(shown.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not imported_by("import ddp_notebook") & {"torch", "IPython", "zmq", "matplotlib"}


WITHOUT_TORCH = (
    *("magics", "session", "session.session_processes", "session.set_up"),
    *("cluster.cluster", "cluster.channels", "cluster.controller"),
    *("views.notebook", "views.bench_figures"),
)


@pytest.fixture(scope="module")
def loaded_torch() -> set[str]:
    """Which of them, imported one after the other, had loaded torch."""
    code = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH}:\n"
        "    importlib.import_module(f'ddp_notebook.{name}')\n"
        "    if 'torch' in sys.modules: print('loaded', name)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {line.split()[1] for line in shown.stdout.splitlines()}


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_neither_the_notebook_kernel_nor_the_controller_loads_torch(
    module: str, loaded_torch: set[str]
) -> None:
    assert module not in loaded_torch


NOT_YET = {"ipyparallel", "matplotlib", "ddp_notebook.diagnosis.diagnose", "ddp_notebook.evidence"}


def test_loading_the_extension_waits_for_nothing_that_only_some_notebooks_need() -> None:
    loaded = imported_by("import ddp_notebook.magics")
    assert not loaded & NOT_YET
    assert not loaded & {"ddp_notebook.jobs.target", "ddp_notebook.jobs.left"}


FOR_ANSWERS = {
    *("ddp_notebook.rank.inspect.answers", "ddp_notebook.rank.inspect.waiting"),
    *("ddp_notebook.model.case", "ddp_notebook.model.diagnosis", "ddp_notebook.model.training"),
    *("ddp_notebook.model.events", "ddp_notebook.model.stacks", "ddp_notebook.rank.calls"),
}


def test_a_prepared_rank_starts_without_what_only_answers_need() -> None:
    assert not imported_by("import ddp_notebook.rank.prepared.attached") & FOR_ANSWERS


@pytest.mark.parametrize(
    "module",
    ["model", "errors", "model.fold", "views.board_rows", "views.output_log", "diagnosis.diagnose"],
)
def test_model_errors_and_analysis_need_the_standard_library_alone(module: str) -> None:
    loaded = imported_by(f"import ddp_notebook.{module}")
    assert not loaded & {"torch", "IPython", "zmq", "matplotlib", "numpy", "psutil", "traitlets"}


FOLDERS = sorted({path.parent for path in MODULES})
COURSE = ("faults/jobs", "workshop")
"""Folders of scripts and exercises, one each: their number is not the house's."""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_folder_is_read_at_a_glance(folder: Path) -> None:
    if str(folder.relative_to(PACKAGE)) not in COURSE:
        files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= 24, f"{len(files)} files; cut a room out of it, at an idea"
        if folder != PACKAGE:
            listed = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
            rooms = [f"{path.parent.name}/" for path in folder.glob("*/__init__.py")]
            named = {line.partition(" ")[0] for line in listed.splitlines()}
            missing = {*files, *rooms} - named
            assert not missing, f"its docstring lists each file and room, and lacks {missing}"


def test_trees_of_source_code_are_made_in_one_place() -> None:
    making = {path.name for path in MODULES if "ast.parse(" in path.read_text("utf-8")}
    assert making == {"syntax.py"}, "threads that make trees at once disturb each other"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_long_file_is_looked_at(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    if lines >= 400:
        warnings.warn(f"{path.relative_to(PACKAGE)} has {lines} lines: one idea?", stacklevel=1)
