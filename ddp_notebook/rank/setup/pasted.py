"""A whole program in a cell: it starts its ranks, makes their group, and destroys it at the end.

The ranks of a session are processes already and have a group. So `init_process_group` keeps that
one where it is what the program asks for, and `destroy_process_group` leaves it; both are said.
Whatever would start ranks within ranks is refused before it begins: what it waits for would never
come. None of this is so in a script, which has processes of its own.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist
import torch.multiprocessing
from torch.cuda import is_available as has_gpu
from torch.distributed import distributed_c10d
from torch.distributed.launcher import api as torch_launcher

from ddp_notebook.launch.launchers import launched_by
from ddp_notebook.model import Category, InitArguments
from ddp_notebook.rank import engine_private, torch_private
from ddp_notebook.rank.component import Component
from ddp_notebook.rank.setup.errors import Refused
from ddp_notebook.rank.setup.rendezvous import InitCalls


class PastedProgram(Component):
    """Lets a program that is written for a launcher run in a cell."""

    def __init__(self, init_calls: InitCalls) -> None:
        self._pid = os.getpid()
        self._kept: tuple[Any, ...] = ()
        """Torch's groups when init_process_group kept the default one; empty if it did not."""
        init_calls.keeps = self._keeps

    def attach(self) -> None:
        """Go around torch's functions, and the shell's that runs ``!command``. Done once."""
        destroys = self._instead_of(dist.destroy_process_group, self._destroy)
        dist.destroy_process_group = distributed_c10d.destroy_process_group = destroys
        of_torch = vars(torch.multiprocessing)
        starts = self._instead_of(of_torch["start_processes"], self._start)
        for place in (of_torch, vars(sys.modules[starts.__module__])):
            place["start_processes"] = starts
        launch = self._instead_of(torch_launcher.launch_agent, _launch)
        torch_launcher.launch_agent = launch
        engine_private.check_commands(_check_command)

    def setup_begins(self) -> None:
        """The group that was kept goes."""
        self._kept = ()

    def _instead_of(self, original: Callable[..., Any], ours: Callable[..., Any]) -> Any:
        """`ours`, which gets `original` and its arguments; in a fork, which is no rank, that."""

        @functools.wraps(original)
        def call(*args: Any, **named: Any) -> Any:
            __tracebackhide__ = True  # IPython leaves the frame out of the user's traceback
            if os.getpid() != self._pid:
                return original(*args, **named)
            return ours(original, *args, **named)

        return call

    def _keeps(self, asked: InitArguments) -> bool:
        """True if a program that asks for a group gets the session's.

        Raises Refused where it asks for another one.
        """
        if os.getpid() != self._pid:
            return False
        rank, size = dist.get_rank(), dist.get_world_size()
        backends = _backends(dist.get_backend_config())
        wanted = _backends(asked.backend)
        # A program for GPUs means the backend for CPUs where there is no GPU.
        without = wanted - backends - (set() if has_gpu() else {"nccl"})
        other, options = [], ""
        if asked.rank not in (None, -1, rank):
            other.append(f"rank {asked.rank} (here: {rank})")
        if asked.world_size not in (None, -1, size):
            other.append(f"{asked.world_size} ranks (here: {size})")
            options += f" --world-size {asked.world_size}"
        if without:
            other.append(f"backend {asked.backend} (here: {'+'.join(sorted(backends))})")
            options += f" --backend {asked.backend}"
        if other:
            anew = f", or make such a group: %ddp_shutdown, then %ddp_init{options}"
            raise Refused(
                f"init_process_group asks for {' and '.join(other)}, but this rank has a group",
                f"Leave what differs out of the call{anew if options else ''}",
                Category.DOUBLE_INIT,
            )
        if not self._kept:
            sys.stderr.write(
                f"init_process_group: the ranks have a group already ({'+'.join(sorted(backends))},"
                f" {size} ranks). It is kept, and destroy_process_group leaves it as it is.\n"
            )
        self._kept = (dist.group.WORLD, *torch_private.known_groups())
        return True

    def _destroy(self, original: Callable[..., None], group: Any = None) -> None:
        if not self._kept or group not in (None, dist.group.WORLD):
            original(group)
            return
        for made in torch_private.known_groups():
            if made not in self._kept:  # the program's own
                original(made)

    def _start(self, original: Any, fn: Any, args: Any = (), *more: Any, **named: Any) -> Any:
        method = named.get("start_method", more[3] if more[3:] else "spawn")
        # A new process has no cells: it would not find what one defines. A fork does.
        if method != "fork" and getattr(fn, "__module__", "") == "__main__":
            _refuse("mp.spawn starts processes", fn)
        return original(fn, args, *more, **named)


def _launch(original: Any, config: Any, entrypoint: Any, *_: Any, **__: Any) -> NoReturn:
    # accelerate's notebook_launcher has the function in an object of its own.
    _refuse("A launcher starts processes", getattr(entrypoint, "launcher", entrypoint))


def _check_command(command: str) -> None:
    """Raise Refused for a command that is a launcher's."""
    if launched := launched_by(command.split()):
        name, program = launched
        raise Refused(
            f"{name} starts ranks, but this cell already runs on ranks",
            f"Run it in a cell of its own, without %%ddp: %ddp_run {program or 'train.py'}",
            Category.NOTEBOOK_LAUNCH,
        )


def _refuse(what: str, function: Any) -> NoReturn:
    """Say how to call what would have run in new processes, whose first argument is the rank."""
    name = getattr(function, "__name__", "main")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    needed = [one.name for one in parameters if one.default is inspect.Parameter.empty]
    if what.startswith("mp."):
        needed = ["rank", *needed[1:]]
    raise Refused(
        f"{what}, but this cell already runs on {dist.get_world_size()} ranks",
        f"Call {name}({', '.join(needed)}) in the cell, where rank and world_size are defined. "
        "Or put the program into a file: %ddp_run --python train.py",
        Category.NOTEBOOK_LAUNCH,
    )


def _backends(config: str) -> set[str]:
    """``cpu:gloo,cuda:nccl`` or ``gloo`` as the names of backends."""
    return {part.rpartition(":")[2] for part in config.lower().split(",") if part}
