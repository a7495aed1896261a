"""The words of findings: a file for each category in `messages`, with the titles of its kinds.

A rule names a kind (``straggler.stopped``) and gives facts; `finding` fills the kind's title and
fix with them. In a template:

- ``{call}`` is a fact: ranks as "ranks 0, 1 and 3", other tuples as "a, b and c";
- ``{ranks:set}`` is how ranks are typed: "0,2-4";
- ``{ranks:waits|wait}`` is the form that goes with how many there are, and of a number the number
  with its noun: ``{steps:step|steps}`` is "3 steps";
- ``<<, in {where}>>`` is left out where a fact in it is empty.

The same files hold the categories' pages, each with two programs: `broken` ends in the finding, and
does not once `corrected` has applied the change in `fixed`. Tests run both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Formatter
from textwrap import fill, indent
from typing import Any

from ddp_notebook.model import (
    Category,
    Decision,
    Finding,
    Place,
    Ranks,
    Side,
    agree,
    format_ranks,
    line_of,
    name_ranks,
)


@cache
def entry(category: str) -> Mapping[str, Any]:
    """Return what the file of a category says: its kinds, and its page."""
    # Here, since most sessions never need it: they have no finding.
    import tomllib

    file = Path(__file__).parent / "messages" / f"{category}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


_HANG = (
    "Timed out waiting 1800000ms for recv operation to complete",
    "Watchdog caught collective operation timeout",
    "watchdog got stuck for 480 seconds",
    "heartbeat monitor timed out",
)


def literals(category: str) -> tuple[str, ...]:
    """Return the error texts that a mistake leads to; in them ``…`` is what differs each time."""
    page = entry(category)["page"]
    return (*page.get("literals", ()), *(_HANG if page.get("hangs") else ()))


def prints(category: str) -> str:
    """Return what torch prints of a mistake, in sentences."""
    page = entry(category)["page"]
    if "prints" in page:
        return " ".join(page["prints"].split())
    if page.get("silent"):
        return "Nothing: the run ends well, and its result is wrong."
    texts = [f"`{text}`" for text in literals(category)]
    listed = " or ".join(filter(None, (", ".join(texts[:-1]), texts[-1]))) + "."
    if page.get("hangs"):
        return f"Nothing until the group's timeout (30 minutes; NCCL 10 minutes); then {listed}"
    return listed


def page(category: Category) -> str:
    """Return the page of a category as text."""
    page = entry(category)["page"]
    says = {
        "What torch prints": prints(category),
        "What it means": page["means"],
        "How it is found": page["found"],
        "How to correct it": page["fix"],
        "What it is not": page["not_this"],
        "Related": ", ".join(page["related"]),
    }
    return "\n".join(
        (
            f"{category.value}\n",
            *(fill(text, 99, initial_indent=f"{key:<20}", **_BESIDE) for key, text in says.items()),
            f"\n{_SHOWN_AS[page.get('how', 'cell')]}\n\n{indent(page['broken'].strip(), '    ')}",
            f"\nThe change:\n\n{indent(page['fixed'].strip(chr(10)), '    ')}",
        )
    )


_BESIDE: Any = {"subsequent_indent": " " * 20, "break_on_hyphens": False}
_SHOWN_AS = {
    "cell": "A %%ddp cell with it:",
    "script": "A script with it, for %ddp_run or torchrun:",
    "fault": "The fault lab has it:",
    "shell": "A command with it:",
}


def corrected(program: str, change: str) -> str:
    """Apply a change to a program: lines of a diff, as ``-old`` and ``+new``, without numbers.

    Raises ValueError where the program has those lines not once.
    """
    changes, lines = change.strip("\n").splitlines(), program.splitlines()
    old, new = ([line[1:] for line in changes if line[:1] in ("", " ", sign)] for sign in "-+")
    places = [n for n in range(len(lines)) if lines[n : n + len(old)] == old]
    if len(places) != 1:
        raise ValueError(f"The program has not exactly one place for this change:\n{change}")
    lines[places[0] : places[0] + len(old)] = new
    return "".join(f"{line}\n" for line in lines)


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
    decides: Decision | None = None,
    patch: str = "",
    **facts: object,
) -> Finding:
    """Make a finding in the words of a kind: its category and its name, ``straggler.stopped``.

    `ranks` and `waiting` are facts of the templates, too. The place `site` is the line that is
    shown, if no line is known that decides. The magics that the fix has in backticks are the
    commands of the finding, as far as they can be run as they stand. `patch` is the change that
    corrects the user's code, if that is certain.
    """
    facts |= {"ranks": ranks, "waiting": tuple(rank for rank in waiting if rank not in ranks)}
    title, fix = words(f"{kind}.title", **facts), words(f"{kind}.fix", **facts)
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
        decides=decides or line_of(site),
        patch=patch,
    )


def words(key: str, /, **facts: object) -> str:
    """Fill the template ``category.kind.part`` with facts; the sentence begins with a capital."""
    category, kind, part = key.split(".")
    template = " ".join(entry(category)["kinds"][kind][part].split())
    for match in reversed([*_OPTIONAL.finditer(template)]):
        named = [name for _, name, _, _ in _FORMATTER.parse(match[1]) if name]
        shown = match[1] if all(map(facts.get, named)) else ""
        template = template[: match.start()] + shown + template[match.end() :]
    text = _FORMATTER.vformat(template, (), facts).strip()
    return f"{text[:1].upper()}{text[1:]}"


_COMMANDS = re.compile(r"`(%ddp_(?:abort|where|why|(?:restart|step) --ranks)\b[^`]*)`")
_OPTIONAL = re.compile(r"<<(.*?)>>", re.DOTALL)


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
