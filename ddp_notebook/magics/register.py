"""The magics. Each parses its line, calls one Session method and returns the value it gives."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class

from ddp_notebook.board.controller import LiveBoard, StillBoard, open_board
from ddp_notebook.board.replay_board import can_show_widgets, prepare_widgets
from ddp_notebook.errors import SetupFailed, UsageMistake
from ddp_notebook.magics.completion import Surroundings, offer_completion
from ddp_notebook.magics.help import TourVerb, give_help_pages
from ddp_notebook.magics.parsing import HelpShown, parser_of, read_line
from ddp_notebook.magics.run_display import RunningCells, is_news
from ddp_notebook.magics.verbs.bench import BenchVerb
from ddp_notebook.magics.verbs.doctor import DoctorVerb
from ddp_notebook.magics.verbs.fault import FaultVerb
from ddp_notebook.magics.verbs.files import SaveVerb
from ddp_notebook.magics.verbs.look import WhereVerb
from ddp_notebook.magics.verbs.ranks import SetupVerbMagics
from ddp_notebook.magics.verbs.wait import DetachedVerb
from ddp_notebook.magics.verbs.wrap import WrapVerb
from ddp_notebook.model import (
    Board,
    Event,
    Ranks,
    StepTable,
    name_ranks,
    parse_ranks,
)
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.session.options import parse_settings
from ddp_notebook.views.notebook import Displays


@magics_class
class DDPMagics(
    BenchVerb,
    DetachedVerb,
    DoctorVerb,
    FaultVerb,
    SaveVerb,
    SetupVerbMagics,
    TourVerb,
    WhereVerb,
    WrapVerb,
    RunningCells,
    Magics,  # type: ignore[misc]
):
    """The verbs of one notebook, on one session."""

    def __init__(self, shell: Any, session: Session) -> None:
        super().__init__(shell)
        self.session = session
        self.displays = Displays(shell)
        self.displays.register()
        self._show_replays()
        self._show_cell_results()
        self._live_board: LiveBoard | StillBoard | None = None
        offer_completion(shell, self._surroundings)
        if can_show_widgets(shell):
            prepare_widgets(shell.kernel)
        session.record.subscribe(self._board_may_change)

    # -- verbs -------------------------------------------------------------------------

    @line_magic
    def ddp_init(self, line: str) -> Board | StepTable | None:
        """Start the ranks: %ddp_init --world-size 4"""
        return self._verb("ddp_init", line, self._init)

    def _init(self, args: argparse.Namespace) -> Board | StepTable:
        options = InitOptions(
            world_size=args.world_size,
            backend=args.backend,
            device=args.device,
            timeout_s=args.timeout,
            master_addr=args.master_addr,
            master_port=args.master_port,
            init_method=args.init_method,
            gpus=tuple(gpu.strip() for gpu in args.gpus.split(",") if gpu.strip()),
            launcher=args.launcher,
            threads_per_rank=args.threads_per_rank,
            store=args.store,
            settings=parse_settings(args.set, args.world_size),
            step=args.step,
        )
        if self.session.ready:
            return self.session.init(options)  # which says that there are ranks already
        self._open_board()
        try:
            board = self.session.init(options)
            return self.session.step_table() if options.step else board
        except SetupFailed as failure:
            self._close_board(failure.board)
            self._show_diagnosis(failure.diagnosis)
            raise
        except BaseException:
            self._close_board(None)
            raise
        finally:
            self._nudge_board()

    @line_magic
    def ddp_status(self, line: str) -> Board | None:
        """The board now: %ddp_status"""
        return self._verb("ddp_status", line, lambda _: self.session.status())

    @line_cell_magic
    def ddp(self, line: str, cell: str | None = None) -> None:
        """Run a cell on the ranks: %%ddp, or %%ddp --ranks 0,2-3"""

        def run(args: argparse.Namespace) -> None:
            if cell is None:
                raise UsageMistake("%%ddp takes a cell: write %%ddp on its first line.")
            ranks = self._ranks(args)
            self._show(args)(
                lambda begun: self.session.run_cell(
                    cell,
                    ranks,
                    number=self._prompt_number(),
                    magic_line=f"%%ddp {line}".rstrip(),
                    wait=args.wait,
                    hold=args.step is not None,
                    detach=args.detach,
                    transform=self.shell.transform_cell,
                    started=begun,
                )
            )

        self._verb("ddp", line, run)

    @line_magic
    def ddp_push(self, line: str) -> None:
        """Send variables of the notebook to the ranks: %ddp_push name [--ranks 0]"""
        self._verb("ddp_push", line, self._push)

    def _push(self, args: argparse.Namespace) -> None:
        names = self.shell.user_ns
        for name in args.names:
            if name not in names:
                raise UsageMistake(f"The notebook has no variable {name!r}.")
        ranks = self.session.push({name: names[name] for name in args.names}, self._ranks(args))
        self._say(f"{', '.join(args.names)} → {name_ranks(ranks)}")

    @line_magic
    def ddp_pull(self, line: str) -> Any:
        """Bring a variable of the ranks here: %ddp_pull loss [--ranks 0] [--as losses]

        The notebook's variable is a dict, rank to value; the value itself when one rank is named.
        """
        return self._verb("ddp_pull", line, self._pull)

    def _pull(self, args: argparse.Namespace) -> Any:
        ranks = self._ranks(args)
        values = self.session.pull(args.name, ranks, keep_tensors="torch" in sys.modules)
        value = next(iter(values.values())) if ranks is not None and len(ranks) == 1 else values
        self.shell.user_ns[args.target or args.name] = value
        return value

    @line_magic
    def ddp_output(self, line: str) -> None:
        """What a rank wrote when it was too much to show: %ddp_output --ranks 0 [--save file]"""
        self._verb("ddp_output", line, self._output)

    def _output(self, args: argparse.Namespace) -> None:
        for rank in self._ranks(args) or (0,):
            everything = self.session.output(rank, log=args.log)
            if args.save:
                path = Path(args.save).expanduser()
                path.write_text(everything, "utf-8")
                self._say(f"Rank {rank}: {len(everything):,} characters → {path}")
                continue
            lines = everything.splitlines()
            left_out = max(0, len(lines) - args.tail)
            above = f" (the last {args.tail} of {len(lines):,} lines; --save FILE keeps all)"
            self._say(f"── rank {rank}{above if left_out else ''} ──")
            self._say("\n".join(lines[left_out:]) or "(nothing)")

    @line_magic
    def ddp_restart(self, line: str) -> Board | None:
        """New processes for ranks, and the group built anew: %ddp_restart [--ranks 1]"""
        return self._verb("ddp_restart", line, self._restart)

    def _restart(self, args: argparse.Namespace) -> Board:
        self._require_ranks("%ddp_restart")
        ranks = self._ranks(args)
        self._open_board()
        return self.session.restart(ranks)

    @line_magic
    def ddp_shutdown(self, line: str) -> None:
        """End the ranks and everything started for them: %ddp_shutdown"""
        self._verb("ddp_shutdown", line, lambda _: self._shutdown())

    def _shutdown(self) -> None:
        had_ranks = self.session.running
        self._close_board(None)  # which keeps what was there last
        self.session.shutdown()
        self._say("All ranks have ended." if had_ranks else "There were no ranks.")

    def _surroundings(self) -> Surroundings:
        """What tab completion may offer beside options."""
        names = [name for name in self.shell.user_ns if not name.startswith("_")]
        return Surroundings(names, self.session.record.snapshot.ranks)

    # -- inside ------------------------------------------------------------------------

    def _verb(self, name: str, line: str, act: Callable[[argparse.Namespace], Any]) -> Any:
        self._tell_of_detached(name)
        try:
            return act(parser_of(name).read(line))
        except HelpShown as help_text:
            self._say(str(help_text))
            return None
        except UsageMistake as mistake:
            raise UsageError(str(mistake)) from None
        finally:
            if self._live_board is not None:
                self._live_board.keep()

    def _ranks(self, args: argparse.Namespace) -> Ranks | None:
        if args.ranks is None:
            return None
        world_size = self.session.record.snapshot.world_size
        if not self.session.running:
            return None  # the verb itself says what is missing
        try:
            return parse_ranks(args.ranks, world_size)
        except ValueError as error:
            raise UsageMistake(str(error)) from None

    def _prompt_number(self) -> int:
        """The n of this cell's ``In [n]``; IPython counts on before a cell runs, or after."""
        inputs = self.shell.user_ns.get("In", ())
        return len(inputs) - 1 if len(inputs) > 1 else int(self.shell.execution_count)

    def _require_ranks(self, verb: str) -> None:
        self.session.require(verb)

    def _say(self, text: str) -> None:
        print(text)  # noqa: T201  # the cell's output is where it belongs

    def _open_board(self) -> None:
        """A live board in this cell; an earlier one stays as it is."""
        self._close_board(None)
        if not self._has_front_end:
            return
        opened = open_board(self.session, self.shell, read_line)
        self._live_board = opened
        self.displays.shown_already()
        opened.open(delay_s=0.02)  # not the board of the session before

    def _close_board(self, final: Board | None) -> None:
        shown, self._live_board = self._live_board, None
        if shown is not None:
            shown.close(final)

    def _board_may_change(self, events: Sequence[Event]) -> None:
        if is_news(events):
            self._nudge_board()

    def _nudge_board(self) -> None:
        if self._live_board is not None:
            self._live_board.nudge()


give_help_pages(DDPMagics)
