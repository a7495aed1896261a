"""What a user installs: the wheel has the package, its notebooks and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import ddp_notebook

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    # With the build backend at hand nothing needs to be downloaded for it.
    isolation = ["--no-build-isolation"] if find_spec("hatchling") else []
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, str(ROOT)],
        check=True,
        cwd=folder,
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_tutorials(wheel: zipfile.ZipFile) -> None:
    folder = ROOT / "notebooks"
    files = (*folder.glob("*.ipynb"), *folder.rglob("*.md"))
    tutorials = {f"ddp_notebook/_notebooks/{p.relative_to(folder)}" for p in files}
    assert tutorials
    assert tutorials <= set(wheel.namelist())


def test_the_wheel_holds_the_boards_script_and_style(wheel: zipfile.ZipFile) -> None:
    page = ROOT / "ddp_notebook" / "board" / "page"
    files = {str(path.relative_to(ROOT)) for path in page.iterdir()}
    assert len(files) > 1
    assert files <= set(wheel.namelist())


def test_the_wheel_holds_every_module_and_nothing_beside_the_package(
    wheel: zipfile.ZipFile,
) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "ddp_notebook").rglob("*.py")}
    assert modules <= names
    assert {name.split("/")[0] for name in names} == {"ddp_notebook"}
    assert not [name for name in names if "__pycache__" in name or ".ipynb_checkpoints" in name]


def test_the_wheel_brings_the_console_script_and_the_licence(wheel: zipfile.ZipFile) -> None:
    info = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")).split("/")[0]
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "ddp-notebook = ddp_notebook.__main__:main" in entry_points
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == ddp_notebook.__version__
    assert f"{ddp_notebook.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
