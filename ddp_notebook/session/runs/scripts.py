"""Runs a script on ranks as torchrun would, unchanged, and reports its outcome."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook import files
from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.errors import CellFailed, UsageMistake, named_file
from ddp_notebook.launch.addresses import free_port
from ddp_notebook.launch.environment import (
    child_environment,
    torchrun_agents_variables,
    torchrun_variables,
)
from ddp_notebook.model import Diagnosis, Ranks
from ddp_notebook.rank import calls
from ddp_notebook.session.interrupts import noted
from ddp_notebook.session.options import Settings, cores
from ddp_notebook.session.runs import post_run
from ddp_notebook.session.runs.controller import RunController
from ddp_notebook.session.runs.gather import LaunchParameters
from ddp_notebook.session.runs.run import CellResult, CellRun, RunOptions
from ddp_notebook.session.setup.limits import check_processes

if TYPE_CHECKING:
    from ddp_notebook.launch.lab_hosts import Placed
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.processes.processes import Processes
    from ddp_notebook.session.runs.registry import RunRegistry


class Scripts:
    """The scripts of a session."""

    def __init__(self, pool: RankPool, runs: RunRegistry) -> None:
        self.seen_late: Diagnosis | None = None
        """What the last script's ranks waited for when one was only late; None if none was."""
        self._pool = pool
        self._runs = runs

    def run(
        self,
        path: str,
        arguments: Sequence[str],
        ranks: Ranks | None,
        options: RunOptions,
        *,
        store: str = "session",
        settings: Settings | None = None,
        placed: Placed | None = None,
        as_module: bool = False,
        as_python: bool = False,
    ) -> CellResult:
        """`Session.run_script`."""
        processes = self._pool.need("%ddp_run")
        ranks = _place_of_python(ranks, options) if as_python else ranks
        script, package = find_module(path) if as_module else (find_script(path), None)
        self._check_processes(processes, ranks)
        claim = self._runs.claim(
            ranks, "%ddp_run", processes.cluster, processes.logs, options, script.name
        )
        with noted() as interrupted, claim as controller:
            controller.run.sources = files.sources(script)
            processes.begin_last_words(controller.run.ranks)
            called = str(script) if as_module else str(Path(path).expanduser())
            command = (str(script), called, *arguments)
            work = ScriptWork(
                controller.run,
                processes,
                command,
                store,
                settings or {},
                placed,
                self._ended,
                self._runs.breakpoints_of,
                package,
                leaves=options.wait == "forever" and not options.hold,
                as_python=as_python,
            )
            return self._runs.carry_out(controller, work, interrupted, options)

    def _check_processes(self, processes: Processes, ranks: Ranks | None) -> None:
        """Raises UsageMistake. The processes of the last script make room for these."""
        count = len(ranks) if ranks is not None else processes.options.world_size
        left = len(processes.script.ranks) if processes.script is not None else 0
        check_processes("%ddp_run", in_script=max(0, count - left))

    def _ended(self, controller: RunController) -> None:
        """No rank is in a script any more."""
        detector = controller.run.detector
        self.seen_late = detector.seen_late if detector is not None else None


@dataclass
class ScriptWork:
    """A script, for a `RunController`: its rendezvous, and how it ends.

    `placed` puts its ranks on hosts of the fault lab, and the store with them. `ended` is called
    when no rank is in it any more.
    """

    run: CellRun
    processes: Processes
    command: Sequence[str]
    """The script's file, how it was called, and its arguments."""
    store: str
    settings: Settings
    placed: Placed | None
    ended: Callable[[RunController], None]
    breakpoints_of: Callable[[int], calls.Breakpoints]
    package: str | None
    leaves: bool
    as_python: bool = False

    def __post_init__(self) -> None:
        if self.as_python:
            self._environments = python_environment(self.processes, self.run.ranks, self.settings)
            self.launch = LaunchParameters(script=True)
            return
        run, processes, store = self.run, self.processes, self.store
        host = processes.options.master_addr
        if self.placed is not None:
            address = self.placed.address
        elif store == "session":
            address = processes.fresh_store()
        else:
            address = (host, free_port(host))
        self._environments = environments(processes, run.ranks, address, store, self.settings)
        self.launch = LaunchParameters(
            {
                "MASTER_ADDR": address[0],
                "MASTER_PORT": str(address[1]),
                "WORLD_SIZE": str(len(run.ranks)),
            },
            run.ranks[0] if store == "rank0" else None,
            lambda: store == "rank0" or processes.script_store_alive,
            script=True,
        )

    def send(self, ranks: Ranks) -> Ranks:
        """Start the script's processes; no rank is unreachable."""
        scripts = {
            rank: calls.Script(
                cell=self.run.cell,
                number=self.run.number,
                path=self.command[0],
                name=self.command[1],
                arguments=tuple(self.command[2:]),
                threads=cores() if self.as_python else self.processes.options.threads,
                breakpoints=self.breakpoints_of(rank),
                paused=self.run.pausing,
                leaves=self.leaves,
                package=self.package,
                world_size=len(self.run.ranks),
            )
            for rank in ranks
        }
        hosts = self.placed.hosts if self.placed is not None else {}
        started = self.processes.open_script(self.run.cell, ranks)
        self.run.started_ranks = started.started_ranks
        started.start(scripts, self._environments, hosts)
        return ()

    def end(self, controller: RunController) -> CellResult:
        """How the script ended, with a diagnosis; its processes stay."""
        run = self.run
        result = run.result()
        diagnosis = Diagnosis() if controller.aborted else self._diagnosed(controller, result)
        if diagnosis.wrong:
            diagnosis = run.with_tracebacks(diagnosis)
            result = replace(result, diagnosis=diagnosis)
            if isinstance(result.error, CellFailed):
                result.error.diagnosis = diagnosis
        elif result.error is None:
            checked = post_run.examine(run, controller.cluster, controller.logs)
            result = replace(result, diagnosis=checked)
        self.ended(controller)
        if self.placed is not None:
            self.processes.end_script()  # also ends the lab's hosts
        return result

    def _diagnosed(self, controller: RunController, result: CellResult) -> Diagnosis:
        """What was wrong: with the ranks that it started itself, else with its own processes."""
        started = self.run.started_ranks
        diagnosis = started.ended(failed=result.error is not None) if started is not None else None
        return diagnosis if diagnosis is not None else diagnose_run(controller.look())


def _place_of_python(ranks: Ranks | None, options: RunOptions) -> Ranks:
    """Which rank's place a script has that is one process. Raises UsageMistake."""
    if options.hold:
        raise UsageMistake(
            "Ranks that a script starts itself do not pause before collectives: leave --step out."
        )
    if ranks is not None and len(ranks) != 1:
        raise UsageMistake("--python runs the script once: leave --ranks out, or name one rank.")
    return ranks or (0,)


def find_script(path: str) -> Path:
    """The script, as an absolute path. Raises UsageMistake when there is none."""
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
    """The file of a module that `python -m name` would run, and its package.

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


def environments(
    processes: Processes, ranks: Ranks, address: tuple[str, int], store: str, settings: Settings
) -> dict[int, dict[str, str]]:
    """The environment of each rank: this process's, what torchrun sets, and `settings`.

    The ranks of a run are numbered from 0, whatever their numbers in the session. An empty value
    unsets its variable.
    """
    common = processes.environment(ranks)
    made = {}
    for index, rank in enumerate(ranks):
        torchruns = {
            **torchrun_variables(index, len(ranks), address, agent_store=store == "session"),
            **torchrun_agents_variables(index, len(ranks)),
        }
        changed = {**torchruns, **settings.get(rank, {})}
        unset = {name for name, value in changed.items() if not value}
        whole = child_environment({**common, **changed})
        made[rank] = {name: value for name, value in whole.items() if name not in unset}
    return made


def python_environment(
    processes: Processes, ranks: Ranks, settings: Settings
) -> dict[int, dict[str, str]]:
    """The same for a script that is one process, as plain `python` has it; it sees all GPUs."""
    common = processes.environment(tuple(range(processes.options.world_size)))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    made = {}
    for rank in ranks:
        changed = {**common, "OMP_NUM_THREADS": threads, **settings.get(rank, {})}
        whole = child_environment(changed)
        made[rank] = {name: value for name, value in whole.items() if value or name not in changed}
    return made
