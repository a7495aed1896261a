"""`ddp-notebook book`: it builds without a warning, and has a page for each finding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_notebook.model import Category

BUILD = (sys.executable, "-m", "ddp_notebook", "book", "--no-browser", "--dir")


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("book") / "site"
    # Sphinx takes a warning, such as a link that leads nowhere, for an error.
    done = subprocess.run([*BUILD, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(folder / "index.html")
    return folder


def test_each_category_has_its_page_and_each_notebook_is_in_it(book: Path) -> None:
    pages = {page.stem for page in (book / "errors").glob("*.html")}
    assert pages == {"index", *Category}
    notebooks = Path(__file__).parents[2] / "notebooks"
    for notebook in notebooks.glob("*.ipynb"):
        assert (book / "course" / f"{notebook.stem}.html").exists()
    start = (book / "index.html").read_text()
    for page in ("hang-now", "silent", "glossary", "findings", "how/own-script", "changelog"):
        assert f'href="{page}.html"' in start and (book / f"{page}.html").exists()


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    done = subprocess.run([*BUILD, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "--dir my-book" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]
