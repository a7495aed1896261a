"""The verbs as IPython's magics: each line is parsed, the verb run, its value returned."""

from __future__ import annotations

import atexit
import errno
from collections.abc import Iterable
from functools import partial
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import no_var_expand

from ddp_notebook import files
from ddp_notebook.board.buttons import Button
from ddp_notebook.board.replay_board import may_show_widgets, prepare_widgets
from ddp_notebook.errors import NoSession, UsageMistake
from ddp_notebook.magics.completion import RankNames, offer_completion, withdraw_completion
from ddp_notebook.magics.hints import Hints
from ddp_notebook.magics.parser import HelpShown
from ddp_notebook.magics.ui import NotebookUi
from ddp_notebook.magics.verb import Verb, VerbButton
from ddp_notebook.magics.verbs import VERBS
from ddp_notebook.magics.verbs.attach import say_whose_ranks, without_ranks
from ddp_notebook.magics.verbs.run import WAIT
from ddp_notebook.session import Session, preflight
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.views import output
from ddp_notebook.views.notebook import Shown
from ddp_notebook.workshop.check import NOTEBOOK

_NO_FOLDER = "The notebook's current folder was removed. Go to another one: %cd ~"
_UI = "_ddp_notebook_magics"
"""The attribute of a shell that holds its NotebookUi while the extension is loaded."""
_HINTS = "_ddp_notebook_hints"
"""The attribute that holds its Hints."""
_NAMES = "_ddp_notebook_names"
"""The attribute that holds its RankNames."""


def load(shell: Any) -> None:
    """Make the verbs magics of `shell`, on a session of its own that ends with Python."""
    if getattr(shell, _UI, None) is not None:
        return
    session = Session()
    ui = register(shell, session)
    NOTEBOOK.ranks = lambda: session.record.snapshot.world_size
    setattr(shell, _UI, ui)
    setattr(shell, _HINTS, Hints(ui))
    setattr(shell, _NAMES, RankNames(ui))
    # A kernel that is shut down or restarted runs this. One that is killed does not: then the fork
    # server sees that its connection is gone, and ends the ranks.
    atexit.register(session.shutdown)
    # Imports torch in the background, so that the first %ddp_init has to wait for the rest only.
    session.pool.warm()
    # Nothing where IPython's configuration loads it, before any cell.
    if len(ui.variables.get("In", ())) > 1:
        ui.say(
            f"ddp_notebook {preflight.loaded_version}: %ddp_init -n 4 starts four ranks · "
            "%ddp_tour names five things to try"
        )


def unload(shell: Any) -> None:
    """End the ranks, and take the magics away from `shell`."""
    ui = getattr(shell, _UI, None)
    if ui is None:
        return
    ranks = ui.session.record.snapshot.world_size if ui.session.running else 0
    ui.session.shutdown()
    if ranks:
        one = "1 rank was ended, and its" if ranks == 1 else f"{ranks} ranks were ended, and their"
        again = f"%load_ext ddp_notebook, then %ddp_init --world-size {ranks}"
        ui.say(f"{one} variables are gone. For new ones: {again}")
    ui.board.withdraw()
    NOTEBOOK.ranks = lambda: 0
    # IPython has no call that removes a magic.
    for kind in ("line", "cell"):
        for verb in VERBS:
            shell.magics_manager.magics[kind].pop(verb.name, None)
    withdraw_completion(shell)
    getattr(shell, _HINTS).withdraw()
    getattr(shell, _NAMES).withdraw()
    setattr(shell, _UI, None)


def register(shell: Any, session: Session) -> NotebookUi:
    """Make the verbs magics of `shell`, on `session`."""
    ui = NotebookUi(shell, session, board_buttons(session, VERBS))
    ui.displays.register()
    formatter = shell.display_formatter.ipython_display_formatter
    for verb in VERBS:
        shell.register_magic_function(_magic(ui, verb), verb.kind, verb.name)
        if verb.value_display is not None:
            formatter.for_type(verb.value_display.value_type, partial(verb.value_display.show, ui))
    offer_completion(shell, ui.surroundings)
    if may_show_widgets(shell):
        prepare_widgets(shell.kernel)
    return ui


def _magic(ui: NotebookUi, verb: Verb) -> Any:
    """The function that IPython calls for a verb."""

    def magic(line: str, cell: str | None = None) -> Any:
        # A detached run may have ended since the last cell. In a terminal nothing shows that by
        # itself, so the next magic says it first.
        if verb is not WAIT:  # which shows the whole run itself
            ui.runs.announce_end()
        try:
            args = verb.parser.read(line)
            args.line, args.cell = line, cell
            say_whose_ranks(ui, verb.name)
            return verb.run(ui, args)
        except HelpShown as page:
            ui.say(str(page))
            return None
        except NoSession as mistake:
            raise UsageError(without_ranks(mistake, ui.attached)) from None
        except UsageMistake as mistake:
            raise UsageError(str(mistake)) from None
        except OSError as error:
            if isinstance(error, FileNotFoundError) and files.current_folder_is_gone():
                raise UsageError(_NO_FOLDER) from None
            if error.errno == errno.EMFILE:
                raise UsageError(preflight.why_no_more_files()) from None
            raise

    # The whole page would be shown by every tooltip; the summary and one call are enough there.
    magic.__doc__ = f"{verb.summary} For example: {verb.examples[0][0]}"
    # IPython's `?` asks an object for `getdoc` before it looks at its docstring.
    setattr(magic, "getdoc", verb.help_page)  # noqa: B010  # a function has no such attribute
    # IPython replaces {x} and $x in the line by variables of the notebook before it calls the
    # magic; in `x = {1: 2}` or an f-string the braces are Python's.
    return no_var_expand(magic) if verb.is_python else magic


# -- the live board's buttons ------------------------------------------------------------


class ButtonUi:
    """The caller's UI of a verb that a button started: what it shows is the button's answer."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.attached = None
        """None: the board with the button is always that of the session's ranks."""
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        """Add `text` to the answer."""
        self.texts.append(text)

    def show(self, value: Shown) -> None:
        """The value of the verb is part of the answer anyway."""

    def show_news(self, run: CellRun) -> None:
        """Add what the ranks wrote since it was shown last."""
        if news := run.events.news():
            self.say(output.outputs(news))

    def open_board(self) -> None:
        """The board with the button is open already."""


def board_buttons(session: Session, verbs: Iterable[Verb]) -> dict[str, Button]:
    """The verbs that have a button, by name."""
    return {
        verb.name: Button(partial(_press, session, verb, verb.button), verb.button.moves_ranks)
        for verb in verbs
        if verb.button is not None
    }


def _press(session: Session, verb: Verb, button: VerbButton, line: str) -> tuple[Any, str]:
    ui = ButtonUi(session)
    value = button.run(ui, verb.parser.read(line))
    value_text = [] if value is None else [button.as_text(value)]
    return value, "\n\n".join([*value_text, *ui.texts])
