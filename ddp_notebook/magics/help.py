"""`%ddp_init?` shows what `%ddp_init -h` does; and `%ddp_tour`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.magic import line_magic

if TYPE_CHECKING:
    from ddp_notebook.magics.parsing import Parser

_TOUR = """\
Five things to try

  1  %ddp_init --world-size 4       four ranks; the board shows how they find each other
  2  %%ddp                          the cell runs on every rank:
     x = torch.ones(1) * rank
     dist.all_reduce(x)
     x
  3  %%ddp                          a hang: rank 0 alone calls barrier. It ends by itself,
     if rank == 0:                  with the rank, the line and the remedy; then %ddp_abort
         dist.barrier()
  4  %ddp_fault duplicate-rank      a set-up that fails, explained; then %ddp_fault --repair
  5  %ddp_bench --max 4M            what an all_reduce costs on this machine

Every magic has a page of help (%ddp_init?), and Tab completes its options."""


def tour_parser() -> Parser:
    """The parser of `%ddp_tour`."""
    from ddp_notebook.magics.parsing import Parser  # which knows the parsers of all verbs

    return Parser("%ddp_tour", "%ddp_tour", "Five things to try, to see what there is.")


def _page(name: str) -> str:
    from ddp_notebook.magics.parsing import parser_of

    page: str = parser_of(name).format_help()
    return page


def give_help_pages(magics: type) -> None:
    """Have IPython's ``?`` show the pages; they are made when somebody asks."""
    from ddp_notebook.magics.parsing import PARSERS

    for name in PARSERS:
        # IPython asks an object for `getdoc` before it looks at its docstring.
        setattr(getattr(magics, name), "getdoc", partial(_page, name))  # noqa: B010


class TourVerb:
    """The verb, for the class of all verbs to inherit."""

    if TYPE_CHECKING:

        def _verb(self, name: str, line: str, act: Callable[[argparse.Namespace], Any]) -> Any: ...

        def _say(self, text: str) -> None: ...

    @line_magic
    def ddp_tour(self, line: str) -> None:
        """Five things to try: %ddp_tour"""
        self._verb("ddp_tour", line, lambda _: self._say(_TOUR))
