"""The limit of open files is the user's: a run that ends leaves it, unless it was reached."""

from __future__ import annotations

import subprocess
import sys

import pytest

END = """
import os, resource, sys
from ddp_notebook.rank.setup.sockets import TorchSockets
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
sockets, taken = TorchSockets(), []
if sys.argv[1] == "reached":
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
before = len(taken)
sockets.end(groups=True)
now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
print("kept" if now == 64 else "raised" if now == most else now)
for descriptor in taken:
    os.close(descriptor)
print(len(os.listdir("/proc/self/fd")) < 10)
"""


@pytest.mark.parametrize(("limit", "then"), [("not reached", "kept"), ("reached", "raised")])
def test_the_limit_of_open_files_is_raised_only_where_it_was_reached(limit: str, then: str) -> None:
    words = [sys.executable, "-c", END, limit]
    ended = subprocess.run(words, check=True, capture_output=True, text=True)
    assert ended.stdout.split() == [then, "True"]
