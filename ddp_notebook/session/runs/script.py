"""Runs a script on the ranks as torchrun would, and ends when it cannot get on any more."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch.addresses import free_port
from ddp_notebook.model import Case, Ranks
from ddp_notebook.session.options import Settings
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.session.runs.stall_detector import Told, gather
from ddp_notebook.session.runs.wait import Send

if TYPE_CHECKING:
    from ddp_notebook.cluster.cluster import RankCluster
    from ddp_notebook.session.processes.lab_hosts import Placed
    from ddp_notebook.session.processes.processes import Processes
    from ddp_notebook.session.record import Record

_SOURCE_BYTES = 1 << 20
_MOST_SOURCES = 100


def find_script(path: str) -> Path:
    """The script, as an absolute path. Raises UsageMistake when there is none."""
    found = Path(path).expanduser()
    if not found.is_file():
        near = sorted(each.name for each in Path.cwd().glob("*.py"))[:5]
        here = f" Here are: {', '.join(near)}." if near else ""
        raise UsageMistake(f"There is no script {path!r} in {Path.cwd()}.{here}")
    return found.resolve()


def sources_of(script: Path) -> dict[str, str]:
    """The script and what lies beside it, by their names; no more than a megabyte."""
    found: dict[str, str] = {}
    left = _SOURCE_BYTES
    for path in (script, *sorted(script.parent.glob("*.py"))[:_MOST_SOURCES]):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            size = path.stat().st_size
            if path.name not in found and size <= left:
                left -= size
                found[path.name] = path.read_text("utf-8")
    return found


def environments(
    ranks: Ranks, address: tuple[str, int], store: str, settings: Settings
) -> dict[str, dict[str, str]]:
    """What torchrun would set for each rank of a run, and `settings`; by rank as text.

    The ranks of a run are counted from 0, whatever their numbers in the session are.
    """
    host, port = address
    made = {}
    for place, rank in enumerate(ranks):
        made[str(rank)] = {
            "RANK": str(place),
            "LOCAL_RANK": str(place),
            "WORLD_SIZE": str(len(ranks)),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": str(True) if store == "session" else "",
            **settings.get(rank, {}),
        }
    return made


class ScriptRun:
    """One run of a script: where its ranks meet, and how it ends.

    `placed` puts them on hosts of the fault lab, and their meeting with them.
    """

    def __init__(
        self,
        processes: Processes,
        record: Record,
        store: str,
        ranks: Ranks,
        placed: Placed | None = None,
    ) -> None:
        self.processes = processes
        self.record = record
        self.ranks = ranks
        self.hosts = placed.hosts if placed is not None else {}
        self.folder = Path.cwd()
        host = processes.options.master_addr
        if placed is not None:
            self.address = placed.address
        elif store == "session":
            self.address = processes.fresh_store()
        else:
            self.address = (host, free_port(host))
        self.store = store
        self._run: CellRun | None = None
        self.told = Told(
            {
                "MASTER_ADDR": self.address[0],
                "MASTER_PORT": str(self.address[1]),
                "WORLD_SIZE": str(len(ranks)),
            },
            ranks[0] if store == "rank0" else None,
            lambda: store == "rank0" or processes.script_store_alive,
        )

    def sending(
        self,
        run: CellRun,
        script: Path,
        arguments: Sequence[str],
        settings: Settings,
    ) -> Send:
        """What sends the script to the ranks."""
        self._run = run
        run.sources = sources_of(script)
        told = {
            "cell": run.cell,
            "number": run.number,
            "path": str(script),
            "folder": str(self.folder),
            "arguments": list(arguments),
            "environments": environments(self.ranks, self.address, self.store, settings),
            "hosts": {str(rank): dict(host) for rank, host in self.hosts.items()},
            "hold": run.held,
        }
        cluster: RankCluster = self.processes.cluster
        return partial(cluster.tell, name="ddp_notebook.rank.cells.scripts:run", arguments=told)

    def look(self) -> Case:
        """The case as it is."""
        return gather(
            self.processes.cluster,
            self.record.snapshot,
            self.told,
            self.ranks,
            lambda: self._run.pending if self._run is not None else (),
            lambda: self.processes.rings.read(self.ranks, self._run.cell if self._run else None),
            sources=self._run.sources if self._run is not None else {},
        )
