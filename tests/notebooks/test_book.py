"""`ddp-notebook book`: it builds without a warning, and has a page for each finding."""

from __future__ import annotations

import pydoc
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

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


def test_a_category_in_a_finding_of_a_notebook_leads_to_its_page(book: Path) -> None:
    courses = [page.read_text() for page in (book / "course").glob("*.html")]
    found = {link for page in courses for link in re.findall(r"'\.\./errors/([\w-]+)\.html'", page)}
    assert "conditional-collective" in found and found <= set(Category)
    assert not any(re.search(rf"\[({'|'.join(Category)})\]</s", page) for page in courses)


HOSTS = {"docs.pytorch.org", "pytorch.org", "semver.org", "github.com"}
"""Where links of the book lead, github.com to its theme alone."""


def test_links_that_leave_the_book_are_well_formed(book: Path) -> None:
    """Their form alone: that they can be reached is left to a check with a network."""
    pages = [page.read_text() for page in book.rglob("*.html")]
    links = {link for page in pages for link in re.findall(r"""href=["'](\w+:[^"']*)""", page)}
    assert len(links) > 8
    for link in links:
        parts = urlsplit(link)
        assert parts.scheme == "https" and parts.netloc in HOSTS, link
        assert not re.search(r"[\s<>`…]|[.,;:)]$|//", link.removeprefix("https://")), link
        if parts.fragment.startswith("torch."):  # torch's pages name what they are about
            assert pydoc.locate(parts.fragment) is not None, link


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    done = subprocess.run([*BUILD, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "--dir my-book" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]
