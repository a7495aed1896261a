"""Connections that ranks could not make in set-up, by the lines that gloo and c10d write."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_REFUSED = re.compile(
    r"failed to connect, willRetry=0,.{0,100} rank=(\d{1,6}), size=(\d{1,6}),"
    r".{0,300}SO_ERROR: Connection refused"
)
_NO_ANSWER = re.compile(
    r"client socket has (?:timed out after \d{1,12}ms while trying to connect to|"
    r"failed to connect to any network address of) \([^,()]{1,300}, (\d{1,5})\)"
)
_WAITED = re.compile(
    r"waitForInput: socket SocketImpl\(fd=\d{1,9}, addr=\S{1,300} "
    r"remote=\S{1,300}:(\d{1,5})\) timed out"
)
_AWAITED = re.compile(
    r"timeout after \d{1,12}ms, keys: /?default_pg/\d{1,6}//cpu//\d{1,6}/(\d{1,6})\b"
)


@dataclass
class Connects:
    """Failed connections in logs. The ports are those of stores."""

    refused: set[int] = field(default_factory=set)
    """Ranks whose connection to another rank's gloo address failed: no process listens there."""
    size: int = 0
    """World size, as gloo has it in these lines; 0 where there are none."""
    unanswered: set[int] = field(default_factory=set)
    """Ports at which a process looked for a store, and found none."""
    reached: set[int] = field(default_factory=set)
    """Ports of stores that a process was connected to, and waited for in vain."""
    awaited: set[int] = field(default_factory=set)
    """Ranks of whom others waited in vain for the address that gloo puts into the store."""

    def add(self, lines: Iterable[str]) -> None:
        """Read the lines of a log."""
        for line in lines:
            if match := _REFUSED.search(line):
                self.refused.add(int(match[1]))
                self.size = max(self.size, int(match[2]))
            elif match := _NO_ANSWER.search(line):
                self.unanswered.add(int(match[1]))
            elif match := _WAITED.search(line):
                self.reached.add(int(match[1]))
            elif match := _AWAITED.search(line):
                self.awaited.add(int(match[1]))
