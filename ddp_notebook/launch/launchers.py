"""Launchers by their command lines: they start ranks, as `%ddp_run` and `%ddp_init` do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

_COMMANDS = frozenset({"accelerate", "deepspeed", "horovodrun", "mpiexec", "mpirun", "torchrun"})
_MODULES = frozenset(
    {
        "accelerate.commands.launch",
        "deepspeed.launcher.runner",
        "torch.distributed.launch",
        "torch.distributed.run",
        "torchrun",
    }
)
_PYTHON = re.compile(r"python[\d.]*")


def launched_by(words: Sequence[str]) -> tuple[str, str] | None:
    """Return the launcher that a command line calls, and what it runs: a program, its arguments.

    The second is empty where no program is seen. None for a command that is no launcher.
    """
    # `NAME=value` before a command is a variable of its environment.
    first = next((n for n, word in enumerate(words) if not re.match(r"\w+=", word)), len(words))
    name, *rest = [PurePath(words[first]).name, *words[first + 1 :]] if words[first:] else [""]
    if _PYTHON.fullmatch(name) and "-m" in rest:
        at = rest.index("-m") + 1
        name, rest = f"-m {rest[at]}" if rest[at:] else "", rest[at + 1 :]
    if name.removeprefix("-m ") not in (_MODULES if name.startswith("-m ") else _COMMANDS):
        return None
    for at, word in enumerate(rest):
        if word.endswith(".py"):
            return name, " ".join(rest[at:])
        if word in ("-m", "--module") and rest[at + 1 :]:
            return name, " ".join(("-m", *rest[at + 1 :]))
    return name, ""
