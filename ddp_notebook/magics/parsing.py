"""One parser per verb. Bad input is a UsageError that ends with the call to type."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.utils.process import arg_split

from ddp_notebook.magics.examples import EXAMPLES
from ddp_notebook.magics.help import tour_parser
from ddp_notebook.magics.verbs.bench import bench_parser
from ddp_notebook.magics.verbs.doctor import doctor_parser
from ddp_notebook.magics.verbs.fault import fault_parser
from ddp_notebook.magics.verbs.files import replay_parser, save_parser
from ddp_notebook.magics.verbs.look import where_parser
from ddp_notebook.magics.verbs.ranks import abort_parser, run_parser, step_parser, why_parser
from ddp_notebook.magics.verbs.wait import wait_parser
from ddp_notebook.magics.verbs.wrap import wrap_parser
from ddp_notebook.session.options import BACKENDS, DEVICES, INIT_METHODS, LAUNCHERS, STORES


class HelpShown(Exception):
    """The user asked for help; `str()` of it is the help."""


class _ShowHelp(argparse.Action):
    """Raises HelpShown where -h is an option of ours, not a word of what comes after a script."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise HelpShown(parser.format_help().strip())


class Parser(MagicArgumentParser):  # type: ignore[misc]
    """argparse for a magic's line. `example` is a call that works."""

    def __init__(self, verb: str, example: str, description: str) -> None:
        super().__init__(
            prog=verb,
            description=f"{textwrap.fill(description, 79)}\n\n{_examples(verb)}",
            add_help=False,
            # IPython's own writes reStructuredText
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.options: dict[str, argparse.Action] = {}
        """By each of its spellings; for tab completion."""
        self.add_argument(
            "-h", "--help", action=_ShowHelp, nargs=0, help="show this and do nothing"
        )
        self.example = example

    def add_argument(self, *names: Any, **how: Any) -> argparse.Action:
        """As argparse's; remembers the options."""
        action: argparse.Action = super().add_argument(*names, **how)
        self.options.update(dict.fromkeys(action.option_strings, action))
        return action

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError that says what is wrong and what to type."""
        raise UsageError(f"{message}. For example: {self.example}   (all options: {self.prog} -h)")

    def read(self, line: str) -> argparse.Namespace:
        """The arguments of `line`. Raises UsageError, HelpShown."""
        # Quotes are taken off as a shell does; on Windows a backslash is part of a path.
        words = arg_split(line, posix=os.name == "posix", strict=False)
        arguments, unknown = self.parse_known_args(words)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments


def _examples(verb: str) -> str:
    calls = EXAMPLES[verb.lstrip("%")]
    width = max(len(call) for call, _ in calls)
    return "\n".join(["examples:", *(f"  {call:<{width}}  {what}" for call, what in calls)])


def with_ranks(parser: Parser) -> Parser:
    """`parser` with the option that names a rank set."""
    parser.add_argument("--ranks", default=None, help="a rank set: 0 or 0,2 or 1-3 or all")
    return parser


def add_run_options(parser: Parser) -> None:
    """The options of whatever runs on the ranks: how it is stepped, and waited for."""
    add = parser.add_argument
    help_ = "stop before each collective; go on with %%ddp_step"
    add("--step", choices=("collective",), default=None, help=help_)
    help_ = "progress: until no rank can get on (default); forever: until all have finished"
    add("--wait", choices=("progress", "forever"), default="progress", help=help_)
    help_ = "return at once, and leave the notebook free; %%ddp_wait waits for the end"
    add("--detach", action="store_true", help=help_)


def _init() -> Parser:
    parser = Parser(
        "%ddp_init",
        "%ddp_init --world-size 4",
        "Start one process per rank and bring torch.distributed up, stage by stage.",
    )
    add = parser.add_argument
    add("-n", "--world-size", type=int, default=4, help="number of ranks (default 4)")
    add("--backend", choices=BACKENDS, default="auto", help="auto: nccl on GPUs, gloo on CPUs")
    add("--device", choices=DEVICES, default="auto", help="auto: GPUs if every rank can have one")
    add("--timeout", type=float, default=60.0, help="seconds set-up may take (default 60)")
    add("--master-addr", default="127.0.0.1", help="where the store listens (default 127.0.0.1)")
    add("--master-port", type=int, default=0, help="its port (default: a free one)")
    add("--init-method", choices=INIT_METHODS, default="env", help="how ranks meet (default env)")
    add("--gpus", default="", help="GPUs to use, one per rank: 0,1,3")
    add("--launcher", choices=LAUNCHERS, default="auto", help="fork: milliseconds; process: plain")
    add("--threads-per-rank", type=int, default=0, help="default: cores / ranks, at least 1")
    add("--store", choices=STORES, default="session", help="who hosts the store (session)")
    add("--set", action="append", default=[], help="RANKS:NAME=value, such as 1:MASTER_PORT=23457")
    add("--step", action="store_true", help="stop before the first stage; go on with %%ddp_step")
    return parser


def _status() -> Parser:
    return Parser("%ddp_status", "%ddp_status", "Show the board.")


def _cell() -> Parser:
    description = (
        "Run the cell on the ranks. A long one: %%ddp --detach, and later %ddp_wait. Collective by "
        "collective: %%ddp --step collective, then %ddp_step"
    )
    parser = with_ranks(Parser("%%ddp", "%%ddp --ranks 0,2-3", description))
    add_run_options(parser)
    return parser


def _push() -> Parser:
    description = "Send variables of the notebook to the ranks."
    parser = with_ranks(Parser("%ddp_push", "%ddp_push batch", description))
    parser.add_argument("names", nargs="+", help="variables of the notebook")
    return parser


def _pull() -> Parser:
    description = (
        "Bring a variable of the ranks here: a dict, rank to value; of one rank, the value."
    )
    parser = with_ranks(Parser("%ddp_pull", "%ddp_pull loss", description))
    parser.add_argument("name", help="a variable of the ranks")
    parser.add_argument("--as", dest="target", default="", help="its name in the notebook")
    return parser


def _output() -> Parser:
    description = (
        "What a rank wrote in its last cell: while it runs, or when it was too much to show."
    )
    parser = with_ranks(Parser("%ddp_output", "%ddp_output --ranks 0", description))
    parser.add_argument("--tail", type=int, default=100, help="how many lines (default 100)")
    parser.add_argument("--save", default="", help="write all of it to this file")
    parser.add_argument("--log", action="store_true", help="what the process wrote beside Python")
    return parser


def _restart() -> Parser:
    description = "New processes for ranks (all by default), and the group built anew."
    return with_ranks(Parser("%ddp_restart", "%ddp_restart --ranks 1", description))


def _shutdown() -> Parser:
    description = "End the ranks and everything started for them."
    return Parser("%ddp_shutdown", "%ddp_shutdown", description)


PARSERS: dict[str, Callable[[], Parser]] = {
    "ddp": _cell,
    "ddp_abort": abort_parser,
    "ddp_bench": bench_parser,
    "ddp_doctor": doctor_parser,
    "ddp_fault": fault_parser,
    "ddp_init": _init,
    "ddp_output": _output,
    "ddp_pull": _pull,
    "ddp_push": _push,
    "ddp_replay": replay_parser,
    "ddp_restart": _restart,
    "ddp_run": run_parser,
    "ddp_save": save_parser,
    "ddp_shutdown": _shutdown,
    "ddp_status": _status,
    "ddp_step": step_parser,
    "ddp_tour": tour_parser,
    "ddp_wait": wait_parser,
    "ddp_where": where_parser,
    "ddp_why": why_parser,
    "ddp_wrap": wrap_parser,
}
"""By the name of the magic; the README's table of verbs is compared with these."""


def read_line(name: str, line: str) -> argparse.Namespace:
    """The arguments of the magic `name`. Raises UsageError, HelpShown."""
    return parser_of(name).read(line)


@cache
def parser_of(name: str) -> Parser:
    """The parser of a magic, made once: making one takes as long as a short cell may."""
    return PARSERS[name]()
