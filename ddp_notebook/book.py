"""`ddp-notebook book`: the course, a page for each finding and the reference, as a website.

Sphinx builds it (an extra), from the notebooks, from what stands in `notebooks/book`, and from the
catalogue of findings.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import webbrowser
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Category

_NEEDED = ("sphinx", "myst_nb", "furo")
_LATER = {"changelog": "CHANGELOG.md", "benchmarks": "tests/benchmarks/RESULTS.md"}
"""Pages that a checkout has, and an installed package beside its notebooks."""
_PROGRAMS = (("broken", "A program with it", "python"), ("fixed", "The change", "diff"))
_ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')
_CATEGORY = re.compile(rf"\[({'|'.join(Category)})\](?=</)")
"""A category in the HTML of a finding."""


def add(commands: Any, notebooks: Callable[[], Path]) -> None:
    """Add the command to a parser's; `notebooks` finds the folder that it is made from."""
    about = "build the course, the pages of all findings and the reference as a website; open it"
    book = commands.add_parser("book", help=about, description=about, allow_abbrev=False)
    book.add_argument(
        "--dir",
        type=Path,
        default=Path("ddp-notebook-book"),
        help="folder for the website (default ./ddp-notebook-book)",
    )
    book.add_argument("--no-browser", action="store_true", help="build it, open no browser")
    book.set_defaults(run=lambda args: _make(args, notebooks()))


def _make(args: argparse.Namespace, notebooks: Path) -> int:
    if any(find_spec(package) is None for package in _NEEDED):
        raise UsageMistake(
            "The book is built by Sphinx, which this Python does not have. Type: "
            f'{sys.executable} -m pip install "ddp-notebook[book]"'
        )
    index = args.dir / "index.html"
    if args.dir.exists() and not index.exists() and any(args.dir.iterdir()):
        raise UsageMistake(f"{args.dir} has other files. Name a folder: --dir my-book")
    with tempfile.TemporaryDirectory(prefix="ddp-book-") as sources:
        write_sources(Path(sources), notebooks)
        # A warning is a link that leads nowhere, or a page that no list has: the book is not built.
        build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-j", "auto"]
        done = subprocess.run([*build, sources, args.dir], check=False)
    if done.returncode:
        return 1
    print(index.resolve())
    if not args.no_browser:
        webbrowser.open(index.resolve().as_uri())
    return 0


def write_sources(folder: Path, notebooks: Path) -> None:
    """Write what Sphinx reads: the book's own pages, the course, and a page for each category."""
    later = shutil.ignore_patterns(*(Path(source).name for source in _LATER.values()))
    shutil.copytree(notebooks / "book", folder, dirs_exist_ok=True, ignore=later)
    shutil.copytree(notebooks, folder / "course", ignore=shutil.ignore_patterns("book", ".*"))
    for notebook in (folder / "course").glob("*.ipynb"):
        text = notebook.read_text(encoding="utf-8")
        linked = _CATEGORY.sub(r"<a href='../errors/\1.html'>[\1]</a>", text)
        notebook.write_text(linked, encoding="utf-8")
    reference = folder / "course" / "REFERENCE.md"
    text = _ANCHOR.sub(r"(\1)=", reference.read_text(encoding="utf-8"))
    reference.write_text(text, encoding="utf-8")
    for name, source in _LATER.items():
        places = (notebooks / "book" / Path(source).name, notebooks.parent / source)
        text = next(place for place in places if place.exists()).read_text(encoding="utf-8")
        # Their links lead to files of the checkout, which the book does not have.
        text = re.sub(r"\[([^\]]+)\]\((?!http)[^)]*\)", r"\1", text)
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    errors = folder / "errors"
    errors.mkdir()
    for category in Category:
        (errors / f"{category}.md").write_text(_page(category), encoding="utf-8")
    (errors / "index.md").write_text(_index(), encoding="utf-8")


def _page(category: Category) -> str:
    """Return the page of a category: what it means, the two programs, what it is not."""
    page = catalogue.entry(category)["page"]
    literals = "".join(f"\n```text\n{text}\n```\n" for text in catalogue.literals(category))
    parts = [
        f"# {category}",
        page["means"],
        f"## What torch prints\n\n{catalogue.prints(category)}\n{literals}",
        *(
            f"## {title}\n\n```{language}\n{page[key].strip()}\n```"
            for key, title, language in _PROGRAMS
            if key in page
        ),
        f"## How to correct it\n\n{page['fix']}",
        f"## How it is found\n\n{page['found']}",
    ]
    if "not_this" in page:
        parts.append(f"## Looks like it, and is not\n\n{page['not_this']}")
    if "related" in page:
        related = ", ".join(f"[{each}]({each}.md)" for each in page["related"])
        parts.append(f"Related: {related}")
    return "\n\n".join(parts) + "\n"


def _index() -> str:
    """Return the page that leads from an error text to the pages of what causes it."""
    categories: dict[str, list[Category]] = {}
    for category in Category:
        for text in catalogue.literals(category):
            categories.setdefault(text, []).append(category)
    rows = "".join(
        f"| `{text}` | {', '.join(f'[{each}]({each}.md)' for each in found)} |\n"
        for text, found in sorted(categories.items(), key=lambda item: item[0].lower())
    )
    pages = "\n".join(Category)
    return f"""# Error texts

A text that several mistakes lead to comes from a rank that only waited: **look first at the rank
that printed nothing, or something else.** `ddp-notebook explain TEXT`, or with a log in place of
the text, answers in a shell; `ddp-notebook why` says which of several it is.

| text | findings |
|---|---|
{rows}
```{{toctree}}
:caption: All findings
:maxdepth: 1

{pages}
```
"""
