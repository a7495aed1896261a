"""ipyparallel's controller, as a function that a child can call.

It imports no torch: at a cold start it is forked before torch is loaded, and would load its own.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence

from ipyparallel.controller.app import IPController
from tornado.ioloop import IOLoop

from ddp_notebook.cluster.ipyparallel_private import keep_heart_in_process
from ddp_notebook.launch.child import die_with_parent


def controller(argv: Sequence[str]) -> None:
    """Run an ipyparallel controller until it is stopped."""
    # If the heart monitor is a child process, it is forked (spawning one costs a second), and must
    # not outlive a killed controller.
    multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_child=lambda: die_with_parent(os.getppid()))
    keep_heart_in_process()
    ignore_the_wall_clock()
    # Its --log-level is not kept to: it would write a line for each message that it relays.
    logging.disable(logging.WARNING)
    sys.argv = ["ipcontroller", *argv]
    IPController.launch_instance(argv=list(argv))


def ignore_the_wall_clock() -> None:
    """Have the event loops of this process measure time by the monotonic clock.

    By default tornado's do so by the wall clock: once that is set back, the heart monitor stands
    still until it is as late again, and no new engine is registered meanwhile.
    """
    IOLoop.time = lambda _: time.monotonic()
