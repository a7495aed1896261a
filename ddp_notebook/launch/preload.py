"""What the fork server imports, so that the processes that it forks have it loaded."""

from __future__ import annotations

ENGINE_MODULES = (
    "ipyparallel.engine.app",
    "ipyparallel.engine.kernel",
    "ipyparallel.controller.app",
    "ipykernel.kernelapp",
    "ipykernel.control",
    "ipykernel.debugger",  # half of the time an engine takes to start
    "ipykernel.comm.manager",
    "IPython.core.completer",
    "IPython.core.completerlib",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "IPython.core.magics",
    "zmq.asyncio",
    "psutil",
)
TORCH_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.data.distributed",
    "ddp_notebook.rank.runtime",
    "ddp_notebook.rank.setup.store_process",
    # The first DDP(...) or optimizer.step() imports these: 2 s in each rank, 1 s once here.
    "torch._dynamo",
)
IDLE_MODULES = ("matplotlib.font_manager", "matplotlib.figure", "matplotlib.pyplot")
"""Imported one by one while no command waits; a command that comes waits for one import.

The matplotlib backend itself must be loaded where the shell is.
"""
