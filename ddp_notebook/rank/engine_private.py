"""Every use of ipykernel's and IPython's private API inside a rank, each checked and tested.

Without it an interrupted cell takes longer to end, and a rank takes more memory.
"""

from __future__ import annotations

import logging.config
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from ipykernel import ipkernel, zmqshell
from IPython.core import guarded_eval, interactiveshell
from traitlets.config import application

INPUTS = 100
"""Sources of cells that a rank keeps, of cells that define nothing: the notebook has them all."""


def list_no_modules() -> None:
    """Have the kernel that is made here not list the files of all modules.

    ipykernel does, for a debugger that is never attached to a rank; reading them copies 15 MB of
    pages that a rank shares with the others. It reads nothing else of `sys` that changes.
    """
    if getattr(ipkernel, "sys", None) is not sys:
        return
    few = ModuleType("sys")
    vars(few).update(vars(sys), modules={})
    ipkernel.sys = few


def configure_one_logger() -> bool:
    """Have the engine's application set up its own logger alone; False if it does it otherwise.

    The standard library goes through all loggers for it, twice: torch has some hundred of them,
    and 2 MB of pages that ranks share would be copied. Those of others stay as they are.
    """
    configure = getattr(application, "dictConfig", None)
    loggers = getattr(logging.root.manager, "loggerDict", None)
    if configure is not logging.config.dictConfig or not isinstance(loggers, dict):
        return False

    def configure_it(config: dict[str, Any]) -> None:
        manager = logging.root.manager
        everything = manager.loggerDict
        manager.loggerDict = {name: logging.getLogger(name) for name in config.get("loggers", ())}
        try:
            configure(config)
        finally:
            manager.loggerDict = everything

    application.dictConfig = configure_it
    return True


def keep_no_tracebacks(shell: Any) -> None:
    """Have `shell` not keep a formatted traceback of each error.

    IPython keeps them for `%notebook`, which has no use on a rank, and formats each traceback
    a second time for it: most of the time that an interrupted cell takes to end.
    """
    if not hasattr(shell, "_format_exception_for_storage"):
        return

    def nothing(exception: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
        name, text = type(exception).__name__, str(exception)
        return {"ename": name, "evalue": text, "traceback": []}

    shell._format_exception_for_storage = nothing


def do_not_say_how_to_exit() -> None:
    """Have IPython not warn after `exit()` that Ctrl-D exits.

    A filter of warnings hides it only until the user's own filters.
    """
    warn = getattr(interactiveshell, "warn", None)
    if warn is not warnings.warn:
        return

    def warn_of_others(
        message: Any, category: type[Warning] | None = None, stacklevel: int = 1, **more: Any
    ) -> None:
        if not str(message).startswith("To exit: use 'exit'"):
            warnings.warn(message, category, stacklevel + 1, **more)

    interactiveshell.warn = warn_of_others


def have_no_prompt() -> None:
    """Remove what tells libraries that a user types at a prompt: Lightning then refuses to run.

    IPython sets it for scripts that it starts interactively, and reads it nowhere.
    """
    for name in ("ps1", "ps2", "ps3"):
        vars(sys).pop(name, None)


def check_commands(check: Callable[[str], None]) -> None:
    """Have `check` called with each ``!command``, its variables expanded.

    It may raise. To go around the shell's own method would take away the frame in which that looks
    for the variables.
    """
    runs = getattr(zmqshell, "system", None)
    if runs is None:
        return

    def system(command: str) -> Any:
        check(command)
        return runs(command)

    zmqshell.system = system


def keep_no_output(shell: Any) -> None:
    """Have `shell` not keep what cells print, which it does without bound.

    That is for `%notebook`, too.
    """
    if not hasattr(shell, "_tee"):
        return
    shell._tee = lambda channel: nullcontext()


def forget_inputs(shell: Any) -> None:
    """Keep the newest `INPUTS` sources of cells, in what `shell` has them: `In`, `_i7` and more."""
    manager = shell.history_manager
    if len(manager.input_hist_raw) < 2 * INPUTS:
        return
    for inputs in (manager.input_hist_raw, manager.input_hist_parsed, manager.db_input_cache):
        del inputs[:-INPUTS]
    numbered = [name for name in shell.user_ns if name[:2] == "_i" and name[2:].isdigit()]
    for name in numbered[:-INPUTS]:
        del shell.user_ns[name]
        shell.user_ns_hidden.pop(name, None)


def complete_inside(kind: type) -> None:
    """Have Tab look into attributes of `kind` (`model.layer1.`).

    IPython does not touch what has a `__getattr__` of its own, which may run anything. That of
    `kind` is known to do nothing but look. Properties stay untouched.
    """
    policies = getattr(guarded_eval, "EVALUATION_POLICIES", None)
    limited = policies.get("limited") if isinstance(policies, dict) else None
    allowed = getattr(limited, "allowed_getattr", None)
    if not isinstance(allowed, set):
        return
    allowed.add(kind)
    for name in ("_getattr_methods", "_getattribute_methods"):  # made of the set, once
        limited.__dict__.pop(name, None)
