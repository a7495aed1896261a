"""What `%ddp_run -m name` runs: the file that `python -m name` would, found without an import."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from ddp_notebook.errors import UsageMistake
from ddp_notebook.session.runs.scripts import find_module, find_script


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a package in it."""
    (tmp_path / "pack" / "inner").mkdir(parents=True)
    for name in ("pack/__init__.py", "pack/__main__.py", "pack/train.py", "alone.py"):
        (tmp_path / name).write_text("raise RuntimeError('it was imported')\n")
    (tmp_path / "pack/inner/deep.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path.resolve()


@pytest.mark.parametrize(
    ("name", "file", "package"),
    [
        ("pack.train", "pack/train.py", "pack"),
        ("pack", "pack/__main__.py", "pack"),
        ("pack.inner.deep", "pack/inner/deep.py", "pack.inner"),
        ("alone", "alone.py", ""),
    ],
)
def test_a_module_is_found_by_its_name(here: Path, name: str, file: str, package: str) -> None:
    assert find_module(name) == (here / file, package)
    assert "pack" not in sys.modules


@pytest.mark.parametrize("name", ["pack.nothing", "pack.inner", "train.py", "sys", "", "a b", "."])
def test_what_cannot_be_run_so_is_refused_with_a_call(here: Path, name: str) -> None:
    with pytest.raises(UsageMistake, match=r"%ddp_run train\.py"):
        find_module(name)


def test_a_folder_is_run_by_its_main_and_an_archive_is_refused(tmp_path: Path) -> None:
    main = tmp_path / "app" / "__main__.py"
    main.parent.mkdir()
    main.write_text("")
    assert find_script(str(main.parent)) == main.resolve()
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    with pytest.raises(UsageMistake, match=r"app\.zip' is an archive"):
        find_script(str(tmp_path / "app.zip"))
