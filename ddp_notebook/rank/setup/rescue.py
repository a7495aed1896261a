"""Frees the main thread when it is blocked inside torch's set-up or a gloo collective.

gloo and TCPStore end a blocked call with an exception when a connection of theirs is shut
down; nothing else does that (aborting the group, time-outs and signals have no effect).
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta

from torch.distributed import TCPStore

from ddp_notebook.rank import state
from ddp_notebook.rank.inspect import data_workers, frames, host, reachability
from ddp_notebook.rank.setup import rendezvous, sockets
from ddp_notebook.rank.setup.store_process import listen


def free() -> dict[str, int | bool]:
    """Shut down torch's connections; how many, and whether a stand-in store was needed.

    Harmless when nothing is blocked, but for the process group: it is broken after it. Workers
    of the DataLoader in which the main thread is are ended.
    """
    state.current.give_up.set()
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    data_workers.end(frames.frames_of(main))
    closed = sockets.shut_down_torchs()
    return {"closed": closed, "stood_in": not closed and host.as_main(stand_in_for_the_store)}


def stand_in_for_the_store() -> bool:
    """Let a main thread that knocks at a port where nobody listens find a store there.

    It connects, goes on to wait on that connection, and the next `free` ends that.
    """
    arguments = rendezvous.log.arguments
    if not rendezvous.log.inside or not arguments.master_port or arguments.hosts_store:
        return False
    if isinstance(reachability.lookup(arguments.master_addr), str):
        return False  # there is no such place, or not yet
    try:
        listener = listen(arguments.master_addr, arguments.master_port)
    except OSError:
        return False
    _stand_ins.append(
        TCPStore(
            arguments.master_addr,
            arguments.master_port,
            None,
            is_master=True,
            timeout=timedelta(seconds=5),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    )
    return True


_stand_ins: list[TCPStore] = []


def drop_stand_ins() -> None:
    """Take away what `stand_in_for_the_store` made."""
    _stand_ins.clear()
