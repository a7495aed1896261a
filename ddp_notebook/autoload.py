"""Called by torch when it is imported: with DDP_NOTEBOOK=1 a rank prepares to answer questions.

Every process that imports torch runs this module, so it imports nothing unless the variable is set,
and raises nothing: an error would break `import torch`.
"""

import contextlib
import os

# Read once, at import: torch calls load() at a time when the user may have changed it.
_WANTED = os.environ.get("DDP_NOTEBOOK", "0") not in ("", "0")
_ON_CPU = "DDP_NOTEBOOK_AS_GPUS" in os.environ


def load() -> None:
    """The entry point, of the group `torch.backends`."""
    if _ON_CPU:  # what a program with --cpu has started; first, for a rank's own torch is around it
        with contextlib.suppress(Exception):
            from ddp_notebook.rank.cells import on_cpu  # here torch is imported, and above not yet

            on_cpu.begin_as_told()
    if _WANTED:
        with contextlib.suppress(Exception):
            early.begin()


# Below, since the import may be the one that imports torch: torch then calls load() within it.
if _WANTED:
    with contextlib.suppress(Exception):
        from ddp_notebook.rank.prepared import early
