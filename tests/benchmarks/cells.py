"""A trivial `%%ddp` cell against ipyparallel's `%%px`, on the same engines in the same notebook."""

from __future__ import annotations

from statistics import median

from rows import Numbers, Row, compare
from support import Kernel

CELLS = 40
"""Of each kind, in turn, in each round."""
ACTIVATE = (
    "_view = get_ipython()._ddp_notebook_magics.session._processes.cluster._client[:]\n"
    "_view.block = True\n_view.activate()"
)


class TrivialCells:
    """Times are a front end's: from sending a cell to its reply."""

    name = "cells"

    def round(self) -> Numbers:
        """Cells of both kinds in turn; the median of each."""
        with Kernel() as kernel:
            kernel.init(4)
            kernel.run_well(ACTIVATE)
            for cell in ("%%ddp\nx = 1", "%%px\nx = 1", "x = 1"):
                kernel.run_well(cell)
            ours, theirs, local = [], [], []
            for _ in range(CELLS):
                ours.append(kernel.run_well("%%ddp\nx = 1").elapsed_s)
                theirs.append(kernel.run_well("%%px\nx = 1").elapsed_s)
                local.append(kernel.run_well("x = 1").elapsed_s)
        return {"ddp_s": median(ours), "px_s": median(theirs), "local_s": median(local)}

    def rows(self, medians: Numbers) -> list[Row]:
        """The bar, and what a cell without any ranks costs."""
        return [
            compare("trivial %%ddp cell, 4 ranks", medians["ddp_s"], medians["px_s"], 1.0, "%%px"),
            Row("trivial cell of the notebook itself", f"{medians['local_s'] * 1000:.1f} ms"),
        ]
