"""Draw the diagrams of the notebooks: ``python notebooks/images/draw.py``.

Four of them show no measurement. ``overlap.svg`` is drawn from one training step that this script
takes with two real ranks, so its numbers differ from run to run. Annotations are values here, for
torch looks at those of a communication hook.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
INK, PALE, BLUE, ORANGE, GREEN, PURPLE = (
    "#1b1f24",
    "#eef1f4",
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#7b4f9d",
)


class Drawing:
    """An SVG of `width` x `height` pixels on white, which reads in a dark notebook, too."""

    def __init__(self, name: str, title: str, width: int, height: int) -> None:
        self._name = name
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" '
            'font-family="system-ui, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = PALE, stroke: str = INK
    ) -> None:
        """Draw a rectangle with its upper left corner at (`x`, `y`)."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        color: str = INK,
        anchor: str = "middle",
        bold: bool = False,
        small: bool = False,
    ) -> None:
        """Write one line whose foot is at `y`."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}"'
            + (' font-weight="600"' if bold else "")
            + (' font-size="11"' if small else "")
            + f">{escape(words)}</text>"
        )

    def arrow(
        self, x: float, y: float, to_x: float, to_y: float, color: str = INK, dashed: bool = False
    ) -> None:
        """Draw an arrow from (`x`, `y`)."""
        self._parts.append(
            f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{color}" stroke-width="1.5" '
            f'fill="none" marker-end="url(#tip)"'
            + (' stroke-dasharray="5 4"' if dashed else "")
            + "/>"
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, color: str = "#9aa4af") -> None:
        """Draw a thin line."""
        self._parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{color}"/>')

    def save(self) -> None:
        """Write the file."""
        (FOLDER / self._name).write_text("\n".join([*self._parts, "</svg>\n"]), "utf-8")


def draw_ranks() -> None:
    """Ranks are processes: each has variables, a model and a device of its own."""
    drawing = Drawing("ranks.svg", "Four ranks on two hosts", 720, 250)
    for host, x in enumerate((10, 365)):
        drawing.box(x, 10, 345, 180, "#fff")
        drawing.text(x + 12, 30, f"host {host}", anchor="start", bold=True)
        for local in range(2):
            left, rank = x + 12 + 165 * local, 2 * host + local
            drawing.box(left, 42, 156, 138)
            drawing.text(left + 78, 62, f"rank {rank}: a process", bold=True)
            drawing.text(left + 78, 82, f"RANK={rank}  LOCAL_RANK={local}", small=True)
            drawing.text(left + 78, 98, "WORLD_SIZE=4", small=True)
            drawing.text(left + 78, 118, "its own variables, model,", small=True)
            drawing.text(left + 78, 133, "optimizer and data", small=True)
            drawing.box(left + 33, 146, 90, 26, BLUE, BLUE)
            drawing.text(left + 78, 164, f"GPU {local}", color="#fff")
    for x in (100, 265, 455, 620):
        drawing.line(x, 180, x, 212, INK)
    drawing.line(100, 212, 620, 212, INK)
    drawing.text(360, 234, "all that they share is what they send: all_reduce, broadcast, ...")
    drawing.save()


def draw_rendezvous() -> None:
    """Draw the sequence of `init_process_group` for two ranks and the store."""
    drawing = Drawing("rendezvous.svg", "How ranks meet at the store", 720, 330)
    columns = {"rank 0": 110, "store": 360, "rank 1": 610}
    for name, x in columns.items():
        drawing.box(x - 75, 12, 150, 30, BLUE if name == "store" else PALE)
        drawing.text(x, 32, name, bold=True, color="#fff" if name == "store" else INK)
        drawing.line(x, 42, x, 318)
    left, middle, right = columns.values()
    steps = [
        (left, middle, "connect to MASTER_ADDR:MASTER_PORT"),
        (left, middle, "set join/0, wait for join/1"),
        (right, middle, "connect"),
        (right, middle, "set join/1, wait for join/0"),
        (middle, left, "join/1 is there"),
        (middle, right, "join/0 is there"),
    ]
    for number, (x, to_x, words) in enumerate(steps):
        y = 70 + 34 * number
        drawing.arrow(x, y, to_x, y)
        drawing.text((x + to_x) / 2, y - 5, words, small=True)
    drawing.box(left - 20, 104, 12, 102, "#fbe3d2", ORANGE)
    drawing.text(left - 28, 160, "waits", anchor="end", color=ORANGE, small=True)
    drawing.arrow(left, 284, right, 284)
    drawing.arrow(right, 300, left, 300)
    drawing.text(
        middle, 279, "exchange addresses through the store, then connect to each other", small=True
    )
    drawing.save()


def draw_ring() -> None:
    """One ring all_reduce of four ranks: sums go round, then results go round."""
    drawing = Drawing("ring.svg", "A ring all_reduce of four ranks", 720, 300)
    halves = [
        (
            20,
            "1. reduce-scatter: 3 times, send one part",
            (0, 1, 2, 3),
            ORANGE,
            "then each rank has one whole sum",
        ),
        (
            380,
            "2. all-gather: 3 times, send a whole sum",
            (1, 2, 3, 0),
            GREEN,
            "then each rank has all sums",
        ),
    ]
    for x, title, parts, color, result in halves:
        drawing.text(x + 160, 28, title, bold=True)
        corners = [(x + 30, 60), (x + 210, 60), (x + 210, 190), (x + 30, 190)]
        for rank, (left, top) in enumerate(corners):
            drawing.box(left, top, 80, 56)
            drawing.text(left + 40, top + 18, f"rank {rank}", small=True, bold=True)
            for part in range(4):
                sent = part == parts[rank]
                drawing.box(left + 6 + 17.5 * part, top + 28, 15, 18, color if sent else "#fff")
        drawing.arrow(x + 112, 88, x + 206, 88)
        drawing.arrow(x + 250, 118, x + 250, 186)
        drawing.arrow(x + 206, 218, x + 112, 218)
        drawing.arrow(x + 70, 188, x + 70, 120)
        drawing.text(x + 160, 156, "coloured: the part", small=True, color=color)
        drawing.text(x + 160, 171, "sent in this step", small=True, color=color)
        drawing.text(x + 160, 275, result, small=True)
    drawing.text(
        360,
        293,
        "each rank sends 2 (n - 1) / n of the tensor, however many ranks there are",
        small=True,
    )
    drawing.save()


def draw_buckets() -> None:
    """Gradients are ready from the last layer to the first, and so are the buckets."""
    drawing = Drawing(
        "buckets.svg", "Buckets are filled from the last layer to the first", 720, 230
    )
    colors = [GREEN, GREEN, BLUE, BLUE, ORANGE, ORANGE]
    for layer, color in enumerate(colors):
        x = 20 + 116 * layer
        drawing.box(x, 50, 100, 34, PALE)
        drawing.text(x + 50, 71, f"layer {layer}")
        drawing.box(x + 10, 100, 80, 22, color, color)
        drawing.text(x + 50, 115, f"gradient {layer}", color="#fff", small=True)
        if layer:
            drawing.arrow(x - 2, 111, x - 24, 111)
    drawing.arrow(20, 32, 690, 32)
    drawing.text(355, 24, "forward", small=True)
    drawing.text(700, 140, "backward begins here", anchor="end", small=True)
    for number, (x, color) in enumerate(((484, ORANGE), (252, BLUE), (20, GREEN))):
        drawing.box(x, 152, 216, 30, "#fff", color)
        drawing.text(x + 108, 172, f"bucket {number}", color=color, bold=True)
        drawing.text(x + 108, 202, ("sent first", "sent second", "sent last")[number], small=True)
    drawing.text(
        360,
        222,
        "a bucket is sent as soon as its last gradient is ready, while backward goes on",
        small=True,
    )
    drawing.save()


def measure_step(rank: int, meeting: str, result: str) -> None:
    """Take training steps as one of two ranks; rank 0 writes the times of the last one, in ms."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(768, 768) for _ in range(6)))
    model = DistributedDataParallel(net, bucket_cap_mb=2)
    times: dict[str, list[float]] = {}

    def reduce_bucket(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        span = [time.monotonic()]
        times[f"bucket {bucket.index()}"] = span
        sent = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()

        def ended(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            span.append(time.monotonic())
            return future.value()[0]

        return sent.then(ended)

    model.register_comm_hook(None, reduce_bucket)
    inputs = torch.randn(512, 768)
    for _ in range(6):
        times.clear()
        dist.barrier()
        began_s = time.monotonic()
        loss = model(inputs).pow(2).mean()
        forward_s = time.monotonic()
        loss.backward()
        ended_s = time.monotonic()
    times = {"forward": [began_s, forward_s], "backward": [forward_s, ended_s], **times}
    if rank == 0:
        in_ms = {name: [1000 * (at_s - began_s) for at_s in span] for name, span in times.items()}
        Path(result).write_text(json.dumps(in_ms), "utf-8")
    dist.destroy_process_group()


def draw_overlap(times_ms: dict[str, list[float]]) -> None:
    """One step as it was measured: communication below the computation that hides it."""
    buckets = sorted(name for name in times_ms if name.startswith("bucket"))
    last_ms = max(end_ms for _, end_ms in times_ms.values())
    drawing = Drawing(
        "overlap.svg", "One training step as it was measured", 720, 110 + 30 * len(buckets)
    )

    def x_of(at_ms: float) -> float:
        return 90 + 600 * at_ms / last_ms

    rows: Iterable[tuple[str, list[str]]] = [("computes", ["forward", "backward"])]
    rows = [*rows, *((name, [name]) for name in buckets)]
    for row, (label, spans) in enumerate(rows):
        y = 40 + 30 * row
        drawing.text(82, y + 15, label, anchor="end", small=True)
        for name in spans:
            begin_ms, end_ms = times_ms[name]
            color = {"forward": BLUE, "backward": PURPLE}.get(name, ORANGE)
            width = max(1.0, x_of(end_ms) - x_of(begin_ms))
            drawing.box(x_of(begin_ms), y, width, 20, color, color)
            words = f"{end_ms - begin_ms:.0f} ms"
            if width > 110:
                words = f"{name if not row else 'all_reduce'}, {words}"
            if width > 40:
                drawing.text(x_of(begin_ms) + width / 2, y + 14, words, color="#fff", small=True)
    foot = 48 + 30 * (1 + len(buckets))
    drawing.line(90, foot, 690, foot, INK)
    drawing.text(90, foot + 16, "0 ms", small=True)
    drawing.text(690, foot + 16, f"{last_ms:.0f} ms", small=True, anchor="end")
    drawing.text(360, 24, "One step of rank 0 of two, gloo on CPUs, as it was measured", bold=True)
    drawing.save()


def main() -> None:
    """Draw all."""
    import torch.multiprocessing as mp

    draw_ranks()
    draw_rendezvous()
    draw_ring()
    draw_buckets()
    with tempfile.TemporaryDirectory() as folder:
        meeting, result = Path(folder, "meeting"), Path(folder, "times.json")
        mp.spawn(measure_step, (str(meeting), str(result)), nprocs=2)
        draw_overlap(json.loads(result.read_text("utf-8")))


if __name__ == "__main__":
    sys.exit(main())
