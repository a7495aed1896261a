"""What torch calls when it is imported: with DDP_NOTEBOOK=1 a rank prepares itself to be asked.

Every process that imports torch comes here, so that nothing is imported before it is known that
somebody wants it, and no error leaves: it would break `import torch`.
"""

import importlib
import os


def load() -> None:
    """The entry point, of the group `torch.backends`."""
    if os.environ.get("DDP_NOTEBOOK", "0") in ("", "0"):
        return
    try:
        importlib.import_module("ddp_notebook.rank.prepared.early").begin()
    except Exception:  # noqa: BLE001  # `import torch` goes on, whatever is wrong with us
        return
