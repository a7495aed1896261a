"""Runs a script or a cell on all ranks and on one: where do they diverge?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddp_notebook.diagnosis.against import compare
from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch.session_folder import remove
from ddp_notebook.model import Ranks
from ddp_notebook.model.against import trail
from ddp_notebook.model.against.comparison import Comparison
from ddp_notebook.model.against.trail import TrailOrder
from ddp_notebook.session.runs.cell_syntax import check_cell
from ddp_notebook.session.runs.endings import CellResult
from ddp_notebook.session.runs.run import CellRun

if TYPE_CHECKING:
    from ddp_notebook.session.findings import LastFindings
    from ddp_notebook.session.pool import RankPool

_ONE, _TURNED = "one", "turned"
_NAMES = (
    "import torch, torch.distributed as dist; from torch.nn.parallel import "
    "DistributedDataParallel as DDP; dist.init_process_group({backend!r}); "
    "rank, world_size, device = dist.get_rank(), dist.get_world_size(), torch.device({device!r})"
)
"""What cells find, in the line where `%%ddp` stands."""

Begun = Callable[[CellRun], None]


class RunScript(Protocol):
    """Runs the script on ranks that keep trails; its first argument is which ranks and how."""

    def __call__(self, trails: dict[int, TrailOrder], started: Begun | None) -> CellResult:
        """How it ended."""


class AgainstOne:
    """Runs a script three times: on all ranks, and on one with its batches in two orders."""

    def __init__(self, pool: RankPool, findings: LastFindings) -> None:
        self._pool = pool
        self._findings = findings

    def run(
        self, script: RunScript, ranks: Ranks | None = None, started: Begun | None = None
    ) -> tuple[CellResult, Comparison | None]:
        """Run `script` on `ranks`, then on one with the same batches; where they diverge.

        There is no comparison if the run on `ranks` failed. Raises UsageMistake for fewer than two
        ranks.
        """
        processes = self._pool.need("--against")
        members = ranks if ranks is not None else tuple(range(processes.options.world_size))
        if len(members) < 2:
            raise UsageMistake(
                "--against 1 compares a run on several ranks with one on a single rank, and this "
                "is a single rank. Start more: %ddp_init --world-size 2"
            )
        names = [f"rank-{index}" for index in range(len(members))]
        with self._folder("trails") as folder:
            orders = [TrailOrder(str(folder), name) for name in names]
            result = script(dict(zip(members, orders, strict=True)), started)
            if result.error is not None or result.pending:
                return result, None
            found = self._findings.last

            def alone(name: str) -> CellResult:
                order = TrailOrder(str(folder), name, tuple(names), turned=name == _TURNED)
                return script({members[0]: order}, None)

            comparison = _compare(folder, names, alone)
            if found is not None:
                self._findings.begin(found)  # %ddp_why reports on the run on all ranks
            return result, comparison

    @contextlib.contextmanager
    def cell_as_script(
        self, source: str, number: int, transform: Callable[[str], str]
    ) -> Iterator[str]:
        """The path of a script that does what a cell does in new processes.

        It has the names that every cell has, but no variables of other cells. Raises
        CellSyntaxError, and UsageMistake for a cell that no script can be.
        """
        devices = self._pool.need("%%ddp").devices
        if check_cell(source, transform):
            raise UsageMistake("--against 1 cannot run a cell with a top-level await.")
        first = _NAMES.format(backend=devices.backend, device=devices.device)
        with self._folder("cell") as folder:
            path = folder / f"cell-{number}.py"
            path.write_text(f"{first}\n{transform(source)}", "utf-8")
            yield str(path)

    @contextlib.contextmanager
    def _folder(self, name: str) -> Iterator[Path]:
        folder = self._pool.need("--against").folder / name
        folder.mkdir(mode=0o700)
        made = folder.stat()
        try:
            yield folder
        finally:
            remove(folder, made)


def _compare(folder: Path, names: list[str], alone: Callable[[str], CellResult]) -> Comparison:
    """Run it twice on one rank, unless it is already known that nothing can be compared."""
    kept = trail.read_all(folder, names)
    count = len(names)
    if len(kept) < count:
        return Comparison(count, refused="a rank left before its script's end (os._exit).")
    ranks = [kept[name] for name in names]
    why_not = compare.why_not([each for each, _ in ranks])
    if why_not:
        return Comparison(count, refused=why_not)
    for name in (_ONE, _TURNED):
        ended = alone(name)
        if ended.error is not None:
            why = str(ended.error).strip().splitlines()[0]
            return Comparison(count, refused=f"it failed on one rank: {why}")
    sides = trail.read_all(folder, (_ONE, _TURNED))
    if len(sides) < 2:
        return Comparison(count, refused="one rank left before its script's end (os._exit).")
    return compare.compare(ranks, sides[_ONE], sides[_TURNED])
