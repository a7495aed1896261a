"""The words of findings: each kind is short, used, and gets the facts that its words name."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

import ddp_notebook
from ddp_notebook.diagnosis import catalogue, error_texts
from ddp_notebook.diagnosis.setup.torch_errors import MEANINGS
from ddp_notebook.model import Category

PACKAGE = Path(ddp_notebook.__file__).parent
KINDS = [
    (category.value, kind)
    for category in Category
    for kind in catalogue.entry(category).get("kinds", {})
]
_KEY = re.compile(r"[a-z-]+(\.[a-z-]+){1,2}")
REMARKS = [("remarks", kind) for kind in catalogue.entry("remarks")["kinds"]]
OF_FINDINGS = {"waiting", "evidence", "passing", "sides", "patch", "site", "decides"}
GIVEN = {"ranks", "waiting"}
"""The facts that each title and fix can name."""
"""What a finding can be given besides its facts."""


class _Typical(str):
    """A fact as long as most are, whatever form is asked for."""

    def __format__(self, spec: str) -> str:
        return "0,2-4" if spec == "set" else spec.partition("|")[2] or str(self)


class _AnyFact(dict[str, _Typical]):
    def __missing__(self, name: str) -> _Typical:
        of_ranks = name in ("ranks", "waiting", "others", "full", "short")
        return _Typical("ranks 0, 1 and 3" if of_ranks else "`all_reduce`")


def facts_in(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def texts_of_the_package() -> set[str]:
    """Every text of the package that may be the key of a kind, or of a part of one."""
    texts = (path.read_text() for path in PACKAGE.rglob("*.py"))
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    return {str(node.value) for node in nodes if isinstance(node, ast.Constant)}


def calls() -> Iterator[tuple[str, list[str], set[str] | None]]:
    """Each call that names kinds: its place, the keys, and the facts given (None for ``**``)."""
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
                keys = [
                    each.value
                    for each in ast.walk(node.args[0])
                    if isinstance(each, ast.Constant) and _KEY.fullmatch(str(each.value))
                ]
                names = None if None in given else {name for name in given if name}
                yield f"{path.name}:{node.lineno}", keys, names


@pytest.mark.parametrize("category", Category)
def test_each_category_has_a_page_in_sentences(category: Category) -> None:
    page = catalogue.entry(category)["page"]
    for name in ("means", "found", "fix", "not_this"):
        assert page[name].rstrip("`").endswith("."), page[name]
    assert catalogue.prints(category).endswith(".")
    shown = catalogue.page(category)
    assert shown.startswith(f"{category.value}\n\nWhat torch prints ")
    assert max(map(len, shown.splitlines())) < 100


@pytest.mark.parametrize("category", Category)
def test_a_page_has_error_texts_or_is_silent_and_two_programs(category: Category) -> None:
    page = catalogue.entry(category)["page"]
    assert bool(catalogue.literals(category)) is not page.get("silent", False)
    assert category not in page["related"] and set(page["related"]) <= set(Category)
    broken = page["broken"].lstrip("\n")
    corrected = catalogue.corrected(broken, page["fixed"])
    assert corrected != broken and len(broken.splitlines()) <= 24
    if page.get("how", "cell") in ("cell", "script"):
        ast.parse(broken), ast.parse(corrected)
    shown = catalogue.page(category)
    assert (
        textwrap.indent(broken.strip(), "    ") in shown and page["not_this"].split()[-1] in shown
    )


def test_a_change_applies_in_one_place_only() -> None:
    program = "x = 1\nif x:\n    y(x)\n"
    assert catalogue.corrected(program, " x = 1\n+z()\n") == "x = 1\nz()\nif x:\n    y(x)\n"
    assert catalogue.corrected(program, "-if x:\n-    y(x)\n+y(x)") == "x = 1\ny(x)\n"
    for change in ("-x\n+y", "-y(x)\n", "-x = 2\n"):
        with pytest.raises(ValueError, match="not exactly one place"):
            catalogue.corrected(program, change)
    with pytest.raises(ValueError, match="not exactly one place"):
        catalogue.corrected("x()\nx()\n", "-x()\n")


def test_the_pages_are_small() -> None:
    folder = PACKAGE / "diagnosis" / "messages"
    files = [(folder / f"{category}.toml").read_text() for category in Category]
    assert sum(len(text.partition("\n[kinds")[0].encode()) for text in files) < 60_000


@pytest.mark.parametrize(("category", "kind"), KINDS, ids=map(".".join, KINDS))
def test_a_kind_is_short_and_says_what_to_do(category: str, kind: str) -> None:
    templates = catalogue.entry(category)["kinds"][kind]
    whole = re.sub("<<|>>", "", " ".join(templates["title"].split()))
    title = Formatter().vformat(whole, (), _AnyFact())
    assert len(title) <= 100, title
    assert not title.endswith(".")
    assert templates["fix"].rstrip("`>").endswith("."), templates["fix"]


def test_each_call_gives_the_facts_that_the_words_need() -> None:
    used, wrong = defaultdict(set), []
    for place, keys, given in calls():
        useful = set()
        for key in keys:
            category, kind, *part = key.split(".")
            templates = catalogue.entry(category)["kinds"].get(kind)
            if templates is None:
                wrong.append(f"{place}: no kind {key}")
                continue
            parts = part or ["title", "fix"]
            used[category, kind].update(parts)
            named = set().union(*(facts_in(templates[each]) for each in parts))
            useful |= named | (set() if part else OF_FINDINGS)
            lacks = named - (given or set()) - (set() if part else GIVEN)
            if given is not None and lacks:
                wrong.append(f"{place}: {key} has no fact for {sorted(lacks)}")
        if keys and given is not None and given - useful:
            wrong.append(f"{place}: {keys} have no use for {sorted(given - useful)}")
    assert not wrong, "\n".join(wrong)
    names = texts_of_the_package()  # a table, or a variable, may have them as well
    unused = {
        key
        for category, kind in (*KINDS, *REMARKS)
        for part in catalogue.entry(category)["kinds"][kind].keys() - used[category, kind]
        if not names.intersection((key := f"{category}.{kind}.{part}", f"{category}.{kind}"))
        or (part not in ("title", "fix") and key not in names)
    }
    assert not unused


def test_what_an_error_of_torch_means_needs_no_more_than_its_text() -> None:
    for meaning in MEANINGS:
        category, kind = meaning.kind.split(".")
        templates = catalogue.entry(category)["kinds"][kind]
        named = facts_in(templates["title"]) | facts_in(templates["fix"])
        assert named <= GIVEN | {"found"}, meaning.kind
        found = catalogue.finding(meaning.kind, (1,), found="nccl")
        assert " ()" not in found.sentence and "  " not in found.sentence


def test_each_text_that_can_mean_several_things_is_explained() -> None:
    of = {text.text for text in error_texts._TEXTS}
    assert of == catalogue.entry("texts")["kinds"].keys()


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
