"""A script on ranks, as torchrun would run it, unchanged: its processes, and how it ends."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.errors import CellFailed, UsageMistake, named_file
from ddp_notebook.launch.environment import (
    child_environment,
    torchrun_agents_variables,
    torchrun_variables,
)
from ddp_notebook.model import Ranks
from ddp_notebook.rank import calls
from ddp_notebook.session.options import Settings
from ddp_notebook.session.runs.endings import CellResult
from ddp_notebook.session.runs.gather import LaunchParameters
from ddp_notebook.session.runs.run import CellRun, RunOptions

if TYPE_CHECKING:
    from ddp_notebook.launch.lab_hosts import Placed
    from ddp_notebook.session.session_processes import Processes


@dataclass(frozen=True, slots=True)
class Script:
    """A program for `%ddp_run`: a file, its name as typed, its package, and as what it runs."""

    file: Path
    called: str
    package: str | None
    arguments: tuple[str, ...] = ()
    store: str = "session"
    settings: Settings = field(default_factory=dict)
    as_python: bool = False
    """It is one process, without torchrun's variables."""
    as_gpus: int = 0
    """Its CPU stands for so many GPUs; 0: for none."""
    placed: Placed | None = None
    """Where the fault lab puts its ranks, and the store with them."""


class ScriptRun(CellRun):
    """A script on its ranks. Each has a process of its own, which stays when it is over."""

    def __init__(
        self, cell: int, ranks: Ranks, processes: Processes, options: RunOptions, what: Script
    ) -> None:
        super().__init__(cell, ranks, processes, options, what.file.name)
        self._what = what
        self._processes = processes
        self._environments: dict[int, dict[str, str]] = {}
        self._files: dict[int, str] = {}
        self._leaves = options.wait == "forever" and not options.hold
        """A rank that needs a finished one loses its connection to it, and does not block."""
        self.breakpoints_of: Callable[[int], calls.Breakpoints] = lambda _: calls.Breakpoints(())

    def prepare(self) -> None:
        """Prepare the rendezvous, once the ranks are claimed: an earlier script's store ends."""
        self._files = self._processes.places.files_of(self._what.file, self.ranks)
        self._environments, self.launch = _environments(self._what, self._processes, self.ranks)

    def send(self) -> Ranks:
        """Start the script's processes; no rank is unreachable."""
        what, processes, places = self._what, self._processes, self._processes.places
        scripts = {
            rank: calls.Script(
                cell=self.cell,
                number=self.number,
                path=self._files[rank],
                name=what.called,
                arguments=what.arguments,
                threads=(places.cores if what.as_python else places.threads)(rank),
                breakpoints=self.breakpoints_of(rank),
                paused=self.pausing,
                leaves=self._leaves,
                package=what.package,
                world_size=len(self.ranks),
                as_gpus=what.as_gpus,
                ledger=self.ledger,
            )
            for rank in self.ranks
        }
        started = processes.open_script(self.cell, self.ranks)
        self.started_ranks = started.started_ranks
        namespaces = what.placed.hosts if what.placed else {}
        started.start(scripts, self._environments, namespaces, places.folder_on)
        return ()

    def end(self) -> CellResult:
        """Return how the script ended, with a diagnosis; its processes stay."""
        result, diagnosis = self.result(), None
        if not self.aborted:
            # Of the ranks that it started itself, else of its own processes.
            if self.started_ranks is not None:
                diagnosis = self.started_ranks.ended(failed=result.error is not None)
            if diagnosis is None:
                diagnosis = diagnose_run(self.look())
        if diagnosis is not None and diagnosis.wrong:
            diagnosis = self.events.with_tracebacks(diagnosis)
            result = replace(result, diagnosis=diagnosis)
            if isinstance(result.error, CellFailed):
                result.error.diagnosis = diagnosis
        elif result.error is None:
            result = replace(result, diagnosis=self.examine())
        self.seen_late = self.detector.seen_late if self.detector is not None else None
        if self._what.placed is not None:
            self._processes.end_script()  # also ends the lab's hosts
        return result


def place_of_python(ranks: Ranks | None, options: RunOptions) -> Ranks:
    """Return the rank whose place a script has that is one process. Raises UsageMistake."""
    if options.hold or options.ledger:
        raise UsageMistake(
            "Ranks that a script starts itself do not pause before collectives and have no ledger: "
            "leave --step and --ledger out."
        )
    if ranks is not None and len(ranks) != 1:
        raise UsageMistake("--python runs the script once: leave --ranks out, or name one rank.")
    return ranks or (0,)


def find_script(path: str) -> Path:
    """Return the script as an absolute path. Raises UsageMistake if it does not exist."""
    script = named_file(path)
    if (inside := script / "__main__.py").is_file():  # Python runs a folder by it
        return inside.resolve()
    if not script.is_file():
        near = sorted(file.name for file in Path.cwd().glob("*.py"))[:5]
        here = f" Here are: {', '.join(near)}." if near else ""
        raise UsageMistake(f"There is no script {path!r} in {Path.cwd()}.{here}")
    if zipfile.is_zipfile(script):
        raise UsageMistake(
            f"{path!r} is an archive. Unpack it, and run the folder: its __main__.py."
        )
    return script.resolve()


def find_module(name: str) -> tuple[Path, str]:
    """Find the file of a module that `python -m name` would run, and its package.

    Imports no package. Raises UsageMistake when there is no such module.
    """
    where: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    spec, package = None, name.rpartition(".")[0]
    for part in name.split("."):
        spec = PathFinder.find_spec(part, where) if where is not None else None
        where = spec.submodule_search_locations if spec is not None else None
    if where is not None:  # a package is run by its __main__
        spec, package = PathFinder.find_spec("__main__", where), name
    if spec is None or not str(spec.origin or "").endswith(".py"):
        raise UsageMistake(
            f"There is no module {name!r} to run in {Path.cwd()} or on Python's path. A script is "
            "run by its file: %ddp_run train.py"
        )
    return Path(str(spec.origin)).resolve(), package


def _environments(
    what: Script, processes: Processes, ranks: Ranks
) -> tuple[dict[int, dict[str, str]], LaunchParameters]:
    """Make the environment of each rank of a script, and the rendezvous that they name.

    With the session's store, the store of an earlier script is replaced.
    """
    if what.as_gpus:  # nor is a real one seen
        hidden = {"CUDA_VISIBLE_DEVICES": "-1"}
        settings = {rank: {**hidden, **what.settings.get(rank, {})} for rank in ranks}
        what = replace(what, settings=settings)
    if what.as_python:
        # As plain `python` has it: all GPUs are seen, and the threads are not counted.
        everyone, made = tuple(range(processes.options.world_size)), {}
        for rank in ranks:
            common = processes.places.environment(everyone, rank)
            common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "")
            common |= processes.devices.of_one_process()
            made[rank] = _environment({}, {**common, **what.settings.get(rank, {})})
        return made, LaunchParameters(script=True)
    if what.placed is not None:
        address = what.placed.address
    elif what.store == "session":
        address = processes.fresh_store()
    else:
        address = processes.places.master_addr, processes.places.free_port(ranks[0])
    count, among = len(ranks), processes.options.placement.among(ranks)
    agent = what.store == "session"
    # The ranks of a run are numbered from 0, whatever their numbers in the session.
    made = {
        rank: _environment(
            processes.places.environment(ranks, rank),
            {
                **torchrun_variables(
                    index, count, address, agent_store=agent, local=among.local(index)
                ),
                **torchrun_agents_variables(index, count, among.group(index)),
                **processes.devices.of_script(rank, index, count),
                **what.settings.get(rank, {}),
            },
        )
        for index, rank in enumerate(ranks)
    }
    launch = LaunchParameters(
        {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1]), "WORLD_SIZE": str(count)},
        ranks[0] if what.store == "rank0" else None,
        lambda: what.store == "rank0" or processes.script_store_alive,
        script=True,
    )
    return made, launch


def _environment(common: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of a process: this one's, `common`, and `own`.

    An empty value in `own` unsets its variable.
    """
    whole = child_environment({**common, **own})
    return {name: value for name, value in whole.items() if value or name not in own}
