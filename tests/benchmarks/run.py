"""Measures every bar in one run and prints one table.

    python tests/benchmarks/run.py [--rounds 5] [--only start,cells] [--kills] [--json FILE]
    python tests/benchmarks/run.py --only browser [--minutes 10]

Numbers are medians over rounds; what is compared is measured in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import uuid
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import classroom
import page_memory
import robustness
import setting_up
from cells import TrivialCells
from communication import Communication
from flood import Flood
from lines import Lines
from memory import Memory
from observing import Observing
from printing import Printing
from rows import Measurement, Numbers, medians, table
from scripts import Scripts
from starting import Starting
from stepping import Stepping
from support import RUN_TAG
from training import Training

MEASUREMENTS: tuple[type[Measurement], ...] = (
    Starting,
    TrivialCells,
    Printing,
    Flood,
    Memory,
    Observing,
    Training,
    Communication,
    Scripts,
    Stepping,
    Lines,
)
LONG = ("classroom", "kills", "browser")
"""Measured only when they are asked for: they take long, or most of a machine's memory."""
NAMES = (*(each.name for each in MEASUREMENTS), "interrupts", "setup", *LONG)


def main() -> int:
    """Measure what was asked for; 0 when every bar is met."""
    arguments = read_arguments()
    os.environ[RUN_TAG] = uuid.uuid4().hex
    load = [os.getloadavg()[0]]
    started = time.monotonic()
    chosen = [each() for each in MEASUREMENTS if each.name in arguments.only]
    rounds: dict[str, list[Numbers]] = {each.name: [] for each in chosen}
    for number in range(arguments.rounds):
        for each in chosen:
            say(f"round {number + 1} of {arguments.rounds}: {each.name}")
            rounds[each.name].append(each.round())
            load.append(os.getloadavg()[0])
    rows = [row for each in chosen for row in each.rows(medians(rounds[each.name]))]
    if "interrupts" in arguments.only:
        rows += robustness.interrupts(arguments.tries)
    if "setup" in arguments.only:
        rows += setting_up.rows(arguments.fault_rounds, arguments.healthy_runs, arguments.tries)
    if "classroom" in arguments.only:
        rows += classroom.rows(arguments.learners)
    if "kills" in arguments.only:
        rows += robustness.kills(arguments.kill_rounds)
    if "browser" in arguments.only:
        rows += page_memory.rows(arguments.minutes)
    facts = {**machine(), "load": max(load), "minutes": (time.monotonic() - started) / 60}
    print(table(rows))
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if arguments.json is not None:
        report = {"facts": facts, "rows": [row.to_json() for row in rows], "rounds": rounds}
        arguments.json.write_text(json.dumps(report, indent=1))
    return int(any(row.met is False for row in rows))


def read_arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="rounds of each measurement (default 5)")
    add("--only", default="", help=f"of {','.join(NAMES)} (default: all but the last three)")
    add("--kills", action="store_true", help="the rounds of kills too: about half an hour")
    add("--kill-rounds", type=int, default=20, help="rounds of each kill (default 20)")
    add("--minutes", type=float, default=10, help="that a board is watched (default 10)")
    add("--tries", type=int, default=50, help="cells after interrupted ones (default 50)")
    add("--fault-rounds", type=int, default=5, help="rounds of each fault (default 5)")
    add("--healthy-runs", type=int, default=200, help="healthy setups with delays (default 200)")
    add("--learners", type=int, default=30, help="sessions in the classroom (default 30)")
    add("--json", type=Path, default=None, help="write all numbers to this file")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",") if arguments.only else list(NAMES[: -len(LONG)])
    unknown = set(wanted) - set(NAMES)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    arguments.only = {*wanted, *(["kills"] if arguments.kills else [])}
    return arguments


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    packages = {name: version(name) for name in ("torch", "ipyparallel", "ipykernel")}
    return {"cores": os.cpu_count(), "python": platform.python_version(), **packages}


def say(text: str) -> None:
    """Tell how far it is, beside the table."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
