"""What torch calls when it is imported: with DDP_NOTEBOOK=1 a rank prepares itself to be asked.

Every process that imports torch comes here, so that nothing is imported before it is known that
somebody wants it, and no error leaves: it would break `import torch`.
"""

import contextlib
import os

_WANTED = os.environ.get("DDP_NOTEBOOK", "0") not in ("", "0")
if _WANTED:
    with contextlib.suppress(Exception):
        from ddp_notebook.rank.prepared import early


def load() -> None:
    """The entry point, of the group `torch.backends`."""
    if _WANTED:
        with contextlib.suppress(Exception):
            early.begin()
