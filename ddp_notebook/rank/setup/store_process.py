"""The store process: it hosts the session's TCPStore, as torchrun's agent does.

It is not the notebook kernel, which never loads torch, and not rank 0, so that the store
outlives every rank. It listens on the address it is given and on no other.
"""

from __future__ import annotations

import signal
from datetime import timedelta

from ddp_notebook.launch.process_ids import own_process_id
from ddp_notebook.model import SESSION, StoreFailed, StoreOpened
from ddp_notebook.rank.events import EventSender
from ddp_notebook.rank.setup.listening import explain, host_store


def main(url: str, source: str, host: str, port: int) -> None:
    """Host a store at `host`:`port` (0: the system chooses) until this process is ended."""
    events = EventSender(SESSION, url, source)
    try:
        store = host_store(host, port, timedelta(seconds=30))
    except (OSError, RuntimeError) as error:
        why = explain(error, host, port)
        events.emit(
            StoreFailed,
            cause=why.cause,
            remedy=why.remedy,
            pid=own_process_id(),
            category=why.category,
        )
        events.close()
        return
    events.emit(StoreOpened, host=host, port=store.port, pid=own_process_id())
    signal.pause()
    del store
