"""A trivial `%%ddp` cell against ipyparallel's `%%px`, on the same engines in the same notebook."""

from __future__ import annotations

import random
from statistics import median

from kernels import Kernel
from rows import Numbers, Row, compare

CELLS = 40
"""Of each kind, in turn, in each round."""
ACTIVATE = (
    "_view = get_ipython()._ddp_notebook_magics.session.pool.processes.cluster._client[:]\n"
    "_view.block = True\n_view.activate()"
)

KINDS = {"ddp_s": "%%ddp\nx = 1", "px_s": "%%px\nx = 1", "local_s": "x = 1"}


class TrivialCells:
    """Times are a front end's: from sending a cell to its reply."""

    name = "cells"

    def round(self) -> Numbers:
        """Cells of both kinds in turn; the median of each."""
        with Kernel() as kernel:
            kernel.init(4)
            kernel.run_well(ACTIVATE)
            for cell in KINDS.values():
                kernel.run_well(cell)
            times: dict[str, list[float]] = {name: [] for name in KINDS}
            order = random.Random(1)
            for _ in range(CELLS):
                # Not always the same after the same: what one leaves behind the next pays for.
                for name in order.sample(sorted(KINDS), k=len(KINDS)):
                    times[name].append(kernel.run_well(KINDS[name]).elapsed_s)
        return {name: median(taken) for name, taken in times.items()}

    def rows(self, medians: Numbers) -> list[Row]:
        """The bar, and what a cell without any ranks costs."""
        return [
            compare("trivial %%ddp cell, 4 ranks", medians["ddp_s"], medians["px_s"], 0.7, "%%px"),
            Row("trivial cell of the notebook itself", f"{medians['local_s'] * 1000:.1f} ms"),
        ]
