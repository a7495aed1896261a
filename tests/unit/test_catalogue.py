"""The words of findings: each kind is short, used, and gets the facts that its words name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

import ddp_notebook
from ddp_notebook.diagnosis import catalogue
from ddp_notebook.model import Category

PACKAGE = Path(ddp_notebook.__file__).parent
KINDS = [
    (category.value, kind)
    for category in Category
    for kind in catalogue.entry(category).get("kinds", {})
]
GIVEN = {"ranks", "waiting"}
"""The facts that each title and fix can name."""


class _Typical(str):
    """A fact as long as most are, whatever form is asked for."""

    def __format__(self, spec: str) -> str:
        return spec.partition("|")[2] or str(self)


class _AnyFact(dict[str, _Typical]):
    def __missing__(self, name: str) -> _Typical:
        of_ranks = name in ("ranks", "waiting", "others", "full", "short")
        return _Typical("ranks 0, 1 and 3" if of_ranks else "`all_reduce`")


def facts_in(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def calls() -> Iterator[tuple[str, int, str, set[str] | None]]:
    """Each call that names a kind: file, line, key, and the facts given (None for ``**``)."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if "catalogue" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "catalogue.finding",
                "catalogue.words",
            ):
                given = {keyword.arg for keyword in node.keywords}
                for key in ast.walk(node.args[0]):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        names = None if None in given else {name for name in given if name}
                        yield path.name, node.lineno, key.value, names


@pytest.mark.parametrize("category", Category)
def test_each_category_has_a_page_in_sentences(category: Category) -> None:
    page = catalogue.entry(category)["page"]
    for name in ("prints", "means", "found", "fix"):
        assert page[name].rstrip("`").endswith("."), page[name]
    shown = catalogue.page(category)
    assert shown.startswith(f"{category.value}\n\nWhat torch prints ")
    assert max(map(len, shown.splitlines())) < 350


@pytest.mark.parametrize(("category", "kind"), KINDS, ids=".".join)
def test_a_kind_is_short_and_says_what_to_do(category: str, kind: str) -> None:
    templates = catalogue.entry(category)["kinds"][kind]
    whole = re.sub("<<|>>", "", " ".join(templates["title"].split()))
    title = Formatter().vformat(whole, (), _AnyFact())
    assert len(title) <= 100, title
    assert not title.endswith(".")
    assert templates["fix"].rstrip("`").endswith("."), templates["fix"]


def test_each_call_gives_the_facts_that_the_words_need() -> None:
    used, wrong = defaultdict(set), []
    for file, line, key, given in calls():
        category, kind, *part = key.split(".")
        templates = catalogue.entry(category)["kinds"].get(kind)
        if templates is None:
            wrong.append(f"{file}:{line}: no kind {key}")
            continue
        parts = part or ["title", "fix"]
        used[category, kind].update(parts)
        named = set().union(*(facts_in(templates[each]) for each in parts))
        other = {"waiting", "evidence", "passing", "sides", "decides"} if not part else set()
        if given is not None and (
            lacks := (named - given - (GIVEN if not part else set())) | (given - named - other)
        ):
            wrong.append(f"{file}:{line}: {key} has no fact, or no use, for {sorted(lacks)}")
    assert not wrong, "\n".join(wrong)
    unused = {
        f"{category}.{kind}.{part}"
        for category, kind in KINDS
        for part in catalogue.entry(category)["kinds"][kind].keys() - used[category, kind]
    }
    assert not unused


def test_a_template_agrees_in_number_and_leaves_out_what_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {
        "late": {
            "title": "{ranks} {ranks:waits|wait} for {names}<<, in {where}>> "
            "after {steps:step|steps}",
            "fix": "Wait for {ranks:it|them}: `%ddp_abort`.",
        }
    }
    monkeypatch.setattr(catalogue, "entry", lambda category: {"kinds": kinds})
    found = catalogue.finding("straggler.late", (0, 1, 3), names=("a", "b"), where="", steps=1)
    assert found.sentence == "Ranks 0, 1 and 3 wait for a and b after 1 step"
    assert found.remedy == "Wait for them: `%ddp_abort`." and found.commands == ("%ddp_abort",)
    found = catalogue.finding("straggler.late", (2,), names=("a",), where="x.py", steps=1200)
    assert found.sentence == "Rank 2 waits for a, in x.py after 1,200 steps"
