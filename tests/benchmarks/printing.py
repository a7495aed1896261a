"""How long a print in a loop takes to a front end, without flush."""

from __future__ import annotations

import re
import time
from statistics import median, quantiles

from cells import ACTIVATE
from kernels import Kernel, seen_in
from rows import Numbers, Row, seconds

PRINTS = 60
STEPS_S = (0.05, 0.01)
"""Time between two prints of a rank: a training step, and a fast loop."""
_STAMP = re.compile(r"stamp (\d+ \d{16,20})")
_LOOP = """%%{magic}
import time
for _ in range({prints}):
    print("stamp", rank, time.time_ns())
    time.sleep({step_s})
"""


class Printing:
    """The rank prints its wall clock, and the front end looks at its own when that arrives."""

    name = "prints"

    def round(self) -> Numbers:
        """A slow and a fast loop on four ranks, by `%%ddp` and by `%%px`."""
        numbers: dict[str, float] = {}
        with Kernel() as kernel:
            kernel.init(4)
            kernel.run_well(ACTIVATE)
            for step_s in STEPS_S:
                for magic in ("ddp", "px"):
                    delays = arrivals(kernel, magic, step_s)
                    numbers[f"{magic}_{step_s}_s"] = median(delays)
                    numbers[f"{magic}_{step_s}_p90_s"] = quantiles(delays, n=10)[-1]
        return numbers

    def rows(self, medians: Numbers) -> list[Row]:
        """The bar for each loop, with its 90th percentile for information."""
        rows = []
        for step_s in STEPS_S:
            ours_s, rival_s = medians[f"ddp_{step_s}_s"], medians[f"px_{step_s}_s"]
            bar = f"print every {step_s * 1000:g} ms arrives after, median"
            rows += [
                Row(
                    bar,
                    seconds(ours_s),
                    f"%%px {seconds(rival_s)}",
                    ours_s / rival_s,
                    "at most 10 ms",
                    ours_s <= 0.010,
                ),
                Row(
                    "  of them 90 % within",
                    seconds(medians[f"ddp_{step_s}_p90_s"]),
                    f"%%px {seconds(medians[f'px_{step_s}_p90_s'])}",
                ),
            ]
        return rows


def arrivals(kernel: Kernel, magic: str, step_s: float) -> list[float]:
    """Seconds from each print on a rank to the message that brings it to the front end."""
    message_id = kernel.send(_LOOP.format(magic=magic, prints=PRINTS, step_s=step_s))
    delays: dict[str, float] = {}
    for message in kernel.listen(message_id, 60):
        now_ns = time.time_ns()
        for stamp in _STAMP.findall(seen_in(message)):
            delays.setdefault(stamp, (now_ns - int(stamp.split()[1])) / 1e9)
    reply = kernel.finish(message_id)
    assert reply.status == "ok", reply.evalue
    assert len(delays) == 4 * PRINTS, f"{len(delays)} of {4 * PRINTS} prints arrived"
    return list(delays.values())
