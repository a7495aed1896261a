"""The words of findings: a file for each category in `messages`, with the titles of its kinds.

A rule names a kind (``straggler.stopped``) and gives facts; `finding` fills the kind's title and
fix with them. In a template:

- ``{call}`` is a fact: ranks as "ranks 0, 1 and 3", other tuples as "a, b and c";
- ``{ranks:set}`` is how ranks are typed: "0,2-4";
- ``{ranks:waits|wait}`` is the form that goes with how many there are, and of a number the number
  with its noun: ``{steps:step|steps}`` is "3 steps";
- ``<<, in {where}>>`` is left out where a fact in it is empty.

The same files hold the categories' pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from ddp_notebook.model import (
    Category,
    Finding,
    Place,
    Ranks,
    Side,
    agree,
    format_ranks,
    in_brackets,
    name_ranks,
)

_LONGEST_TITLE = 100


@cache
def entry(category: str) -> Mapping[str, Any]:
    """Return what the file of a category says: its kinds, and its page."""
    # Here, since most sessions never need it: they have no finding.
    import tomllib

    file = Path(__file__).parent / "messages" / f"{category}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def page(category: Category) -> str:
    """Return the page of a category as text."""
    says = {key: " ".join(value.split()) for key, value in entry(category)["page"].items()}
    return (
        f"{category.value}\n\n"
        f"What torch prints   {says['prints']}\n"
        f"What it means       {says['means']}\n"
        f"How it is found     {says['found']}\n"
        f"How to correct it   {says['fix']}"
    )


def finding(
    kind: str,
    ranks: Ranks,
    /,
    *,
    waiting: Ranks = (),
    evidence: tuple[str, ...] = (),
    passing: bool = False,
    sides: tuple[Side, ...] = (),
    site: Place | None = None,
    **facts: object,
) -> Finding:
    """Make a finding in the words of a kind: its category and its name, ``straggler.stopped``.

    `ranks` and `waiting` are facts of the templates, too. The place `site` ends the title if there
    is room for it, and else is the first line of evidence. The magics that the fix has in
    backticks are the commands of the finding, as far as they can be run as they stand.
    """
    facts |= {"ranks": ranks, "waiting": tuple(rank for rank in waiting if rank not in ranks)}
    title, fix = words(f"{kind}.title", **facts), words(f"{kind}.fix", **facts)
    if site is not None and len(title) + len(in_brackets(site)) <= _LONGEST_TITLE:
        title += in_brackets(site)
    elif site is not None:
        evidence = (str(site), *evidence)
    return Finding(
        Category(kind.partition(".")[0]),
        ranks,
        title,
        fix,
        waiting,
        evidence,
        passing,
        tuple(_COMMANDS.findall(fix)),
        sides,
        titled=True,
    )


def words(key: str, /, **facts: object) -> str:
    """Fill the template ``category.kind.part`` with facts; the sentence begins with a capital."""
    category, kind, part = key.split(".")
    template = " ".join(entry(category)["kinds"][kind][part].split())
    text = _OPTIONAL.sub(lambda match: _if_known(match[1], facts), template)
    text = _FORMATTER.vformat(text, (), facts).strip()
    return f"{text[:1].upper()}{text[1:]}"


_COMMANDS = re.compile(r"`(%ddp_(?:abort|where|why|(?:restart|step) --ranks)\b[^`]*)`")
_OPTIONAL = re.compile(r"<<(.*?)>>", re.DOTALL)


def _if_known(part: str, facts: Mapping[str, object]) -> str:
    """Return an optional part of a template, or nothing where one of its facts is empty."""
    named = [name for _, name, _, _ in _FORMATTER.parse(part) if name]
    return part if all(facts[name] for name in named) else ""


class _Facts(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        """Return a fact as the template asks for it."""
        if "|" in format_spec:
            one, many = format_spec.split("|")
            if isinstance(value, int):
                return f"{value:,} {one if value == 1 else many}"
            return agree(value, one, many)
        if format_spec == "set":
            return format_ranks(value)
        if isinstance(value, tuple | list):
            if all(isinstance(each, int) for each in value):
                return name_ranks(value)
            *first, last = map(str, value)
            return " and ".join(filter(None, (", ".join(first), last)))
        return str(super().format_field(value, format_spec))


_FORMATTER = _Facts()
