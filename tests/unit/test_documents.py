"""README, CONTRIBUTING and their neighbours: short, with links and paths that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ddp_notebook"
DOCUMENTS = [
    *ROOT.glob("*.md"),
    # Those of the book lead to pages that are made with it, and Sphinx looks for them.
    *(page for page in (ROOT / "notebooks").rglob("*.md") if "book" not in page.parts),
    ROOT / "tests" / "benchmarks" / "RESULTS.md",
]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
MODULE = re.compile(r"`((?:\w+/)+\w+\.(?:py|js|css|md))`")
MOST_LINES = 250
"""Of the README: it is a page."""


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_the_readme_is_a_page() -> None:
    assert len(text("README.md").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text("utf-8")) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_every_path_in_contributing_exists() -> None:
    paths = MODULE.findall(text("CONTRIBUTING.md"))
    assert paths
    assert [p for p in paths if not (PACKAGE / p).exists() and not (ROOT / p).exists()] == []


def test_contributing_says_what_each_file_is_that_tests_share() -> None:
    named = set(re.findall(r"`(\w+)`", text("CONTRIBUTING.md").partition("What tests share")[2]))
    assert {path.stem for path in (ROOT / "tests").glob("*.py")} - named == set()


def test_the_tree_in_contributing_has_every_room_and_no_other() -> None:
    tree = text("CONTRIBUTING.md").partition("```\nddp_notebook/\n")[2].partition("```")[0]
    rooms, parents = set(), [""]
    for line in tree.splitlines():
        if room := re.match(r"( +)(\w+)/ ", line):
            depth = len(room[1]) // 2
            parents[depth:] = [f"{parents[depth - 1]}{room[2]}/"]
            rooms.add(parents[depth])
    folders = {str(p.parent.relative_to(PACKAGE)) + "/" for p in PACKAGE.rglob("*.py")} - {"./"}
    assert rooms == folders
