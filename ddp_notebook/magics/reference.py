"""The reference page, made from the verbs: notebooks/REFERENCE.md.

Write it again after a change: python -m ddp_notebook.magics.reference > notebooks/REFERENCE.md
"""

from __future__ import annotations

import re
import sys

from ddp_notebook.magics.parser import Option
from ddp_notebook.magics.verbs import VERBS
from ddp_notebook.model import Stage

_MAGIC = re.compile(r"%%?(?:ddp(?:_\w+)?)(?: --\w[\w-]*)?")
_INTRODUCTION = """\
# Reference: every magic and every option

<!-- Made from ddp_notebook/magics/verbs; a test compares. After a change there:
     python -m ddp_notebook.magics.reference > notebooks/REFERENCE.md -->

In a notebook every magic shows its part of this page with `-h` (or `%ddp_init?`), and Tab completes
its options. A magic shows its value wherever in a cell it stands, unless it is assigned, as in
`board = %ddp_status`. A rank set is written `0`, `0,2`, `1-3` or `all`. A magic marked ▸ is also a
button of the live board. The stages of setup are
{stages}.
"""
_PROGRAM = """\
## In a program

Most magics do what a session does: `%ddp_where` is `session.where()`, `%%ddp` is `run_cell`,
`%ddp_run` is `run_script`; `help(session.run_cell)` shows one. The parts of a session have the
rest, as `session.runs.current` or `session.breakpoints.add`; `help(Session)` names them. What goes
wrong on ranks is in `result.error`, with the cause and the remedy; a wrong call raises an error
that says what to write. The ranks end with the program, or by `shutdown`.

```python
from ddp_notebook import InitOptions, Session

session = Session()
session.init(InitOptions(world_size=4))
session.run_cell("x = rank * 10")
print(session.pull("x"))
result = session.run_script("train.py", ["--epochs", "2"])
if result.error is not None:
    print(result.error)
session.shutdown()
```
"""


def reference() -> str:
    """The page, as Markdown."""
    stages = ", ".join(f"`{stage.value}`" for stage in Stage)
    rows = [
        f"| [`{verb.magic}`](#{verb.name}){' ▸' if verb.button else ''} | {_text(verb.summary)} |"
        for verb in VERBS
    ]
    index = ["| magic | what it does |", "|---|---|", *rows, ""]
    sections = []
    for verb in VERBS:
        width = max(len(call) for call, _ in verb.examples)
        sections += [
            # Written out: GitHub and JupyterLab make different anchors from headings with a %.
            f'<a id="{verb.name}"></a>\n',
            f"## {verb.magic}{' ▸' if verb.button else ''}\n",
            f"{_text(verb.about)}\n",
            "```",
            *(f"{call:<{width}}  # {purpose}" for call, purpose in verb.examples),
            "```\n",
        ]
        if verb.options:
            options = (f"| {_typed(option)} | {_text(option.help)} |" for option in verb.options)
            sections += ["| option | meaning |", "|---|---|", *options, ""]
    return "\n".join([_INTRODUCTION.format(stages=stages), *index, *sections, _PROGRAM])


def _typed(option: Option) -> str:
    """How an option is typed: its names, and the placeholder of its value."""
    *others, last = option.names
    value = option.metavar or f"{{{','.join(option.choices)}}}"
    typed = last if option.is_positional or option.is_flag else f"{last} {value}"
    return ", ".join(f"`{name}`" for name in (*others, typed))


def _text(text: str) -> str:
    """A sentence with its magics as code, fit for a table."""
    return _MAGIC.sub(lambda match: f"`{match[0]}`", text).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
