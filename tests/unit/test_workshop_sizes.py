"""The exercises with 2 to 8 ranks: natural right answers pass, natural wrong ones do not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ddp_notebook.workshop import check
from ddp_notebook.workshop.check import NOTEBOOK

SIZES = range(2, 9)


@pytest.fixture(params=SIZES)
def n(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of ranks of the notebook."""
    monkeypatch.setattr(NOTEBOOK, "ranks", lambda: request.param)
    return int(request.param)


def shared_out(n: int, *, epochs_differ: bool = True) -> dict[int, list[int]]:
    """The images of 6.3 as a DistributedSampler deals them: padded from the front."""
    share = math.ceil(1440 / n)
    orders = [list(range(1440)), list(range(1440))[:: -1 if epochs_differ else 1]]
    padded = [order + order[: share * n - 1440] for order in orders]
    return {rank: [i for order in padded for i in order[rank::n]] for rank in range(n)}


def everywhere(n: int, value: Any) -> dict[int, Any]:
    return dict.fromkeys(range(n), value)


def test_right_answers_pass_with_any_number_of_ranks(n: int) -> None:
    mean = (n - 1) / 2
    step, stopped = divmod(31 * n + 6, n)
    others = [rank for rank in range(n) if rank != 1]
    alike = everywhere(n, {"one": True, "two": False})
    odd = n - 2
    right = [
        *(("1.1", everywhere(n, m)) for m in (mean, np.array([mean]), np.float32(mean))),
        ("1.1", everywhere(n, torch.tensor([mean]))),
        *(("1.2", images) for images in (4 * n, 4.0 * n, np.int64(4 * n))),
        ("1.3", (n - 1, {rank: [float(rank)] for rank in range(n)})),
        ("1.3", (np.int64(0), everywhere(n, [1.0, 2.0]))),
        *(("2.1", key) for key in ("join/1", " join/1", "join/1\n")),
        *(("2.2", said) for said in (others, tuple(others), ",".join(map(str, others)))),
        *(("2.4", everywhere(n, count)) for count in (n, float(n), np.int64(n))),
        ("4.6", (1 / n, {rank: (float(rank == n - 1), 1 / n) for rank in range(n)})),
        ("4.6", (round(1 / n, 2), {rank: (float(rank == n - 1), 1 / n) for rank in range(n)})),
        *(("5.2", {r: as_(r - 1 if r else n - 1) for r in range(n)}) for as_ in (int, float)),
        *(("5.3", said) for said in ("0", 0, [0])),
        *(("5.4", (n - 1, line)) for line in (11, 12, 12.0, "line 11")),
        *(("5.4", said) for said in (f"{n - 1}, 11", f"(rank {n - 1}, line 12)")),
        *(("6.1", (72 * n, factor)) for factor in (1 / n, round(1 / n, 3), np.float64(1 / n))),
        *(("6.2", (alike, everywhere(n, as_(odd)))) for as_ in (int, float, np.int64)),
        ("6.3", (everywhere(n, "0a1b2c3d"), shared_out(n))),
        *(("8.1", (batch, 1e-7)) for batch in (64 // n, f" {math.ceil(64 / n)}", 64 / n // 1)),
        *(("8.3", of(9 for _ in range(n))) for of in (list, tuple)),
        *(("10.1", (as_(stopped), as_(step))) for as_ in (int, float, np.int64)),
        ("10.1", (f"rank {stopped}", str(step))),
        ("10.1", f"{stopped}, {step}"),
        *(("10.2", (n - 1, name)) for name in ("epoch", " epoch\n")),
        ("10.2", f"({n - 1}, 'epoch')"),
        *(("10.3", of) for of in ((n - 1, 11), [n - 1, 11.0], (f"Rank {n - 1}", "Line 11"))),
        *(("10.4", of) for of in ((8, 2), [8, np.int64(2)], (8, torch.tensor(2)))),
    ]
    if n == 2:  # either differs from the other
        right += [("6.2", (alike, everywhere(n, 1))), ("10.2", (0, "epoch"))]
    for name, answer in right:
        verdict = check(name, answer)
        assert verdict.passed, (answer, verdict)
        assert verdict.text.startswith("right")


def test_wrong_answers_do_not_pass_with_any_number_of_ranks(n: int) -> None:
    mean, total = (n - 1) / 2, n * (n - 1) / 2
    step, stopped = divmod(31 * n + 6, n)
    alike = everywhere(n, {"one": True, "two": False})
    norms = {rank: (float(rank == n - 1), 1 / n) for rank in range(n)}
    mark, seen = everywhere(n, "0a1b2c3d"), shared_out(n)
    wrong: list[tuple[str, Any]] = [
        *(("1.1", everywhere(n, value)) for value in (total, mean + 0.5, n / 2, None, [mean] * 2)),
        ("1.1", {rank: rank for rank in range(n)}),
        ("1.1", {0: mean}),
        *(("1.2", images) for images in (4, n, 4 * n + 4, math.ceil(1440 / (4 * n)), "many")),
        *(("1.3", (rank, {r: [float(r)] for r in range(n)})) for rank in (0, n, -1, "0", None)),
        *(("2.1", key) for key in ("join/0", f"join/{n}", "join", "1", "rank1")),
        *(("2.2", said) for said in ("1", [1], list(range(n)), "0,1", [])),
        *(("2.4", everywhere(n, count)) for count in (n - 1, 2 * n, n + 1, 0, None)),
        ("4.6", (1, norms)),
        ("4.6", (0, norms)),
        ("4.6", (n, norms)),
        ("4.6", (1 / (n + 3), norms)),
        ("4.6", ("1/n", norms)),
        *(("5.2", {r: r + k for r in range(n)}) for k in (0, 0.5, n)),
        ("5.2", everywhere(n, 0)),
        ("5.2", everywhere(n, -1)),
        *(("5.3", said) for said in ("1-3", "0-3", "3", [], [1, 2])),
        *(("5.4", (rank, line)) for rank, line in ((0, 11), (n - 1, 13), (n - 1, 17), (n, 11))),
        ("5.4", n - 1),
        *(("5.4", said) for said in ((f"line {n - 1}", 11), (n - 1, "rank 11"), "11")),
        *(("6.1", pair) for pair in ((72, 1 / n), (72 * n, n), (72 * n, 1), (36 * n, 1 / n))),
        ("6.1", 72 * n),
        ("6.2", (alike, {rank: rank for rank in range(n)})),
        ("6.2", (alike, everywhere(n, n))),
        ("6.2", (alike, everywhere(n, -1))),
        ("6.2", (everywhere(n, {"one": True, "two": True}), everywhere(n, n - 2))),
        ("6.2", (everywhere(n, True), everywhere(n, n - 2))),
        ("6.3", (everywhere(n, "untrained"), seen)),
        ("6.3", ({rank: str(rank) for rank in range(n)}, seen)),
        ("6.3", (mark, everywhere(n, list(range(1440)) * 2))),
        ("6.3", (mark, everywhere(n, seen[0]))),
        ("6.3", (mark, shared_out(n, epochs_differ=False))),
        *(("8.1", (batch, 1e-7)) for batch in (64, 64 // n + 2, 64 // n - 1, 0, None)),
        ("8.3", [*[9] * (n - 1), 10]),
        ("8.3", [9] * (n + 1)),
        *(("10.1", (r, step)) for r in range(n) if r != stopped),
        *(("10.1", (stopped, s)) for s in (0, step - 1, step + 1, 99, 100, "all")),
        ("10.1", (step, stopped)),
        ("10.1", stopped),
        *(("10.1", (f"{kind} {stopped}", step)) for kind in ("line", "Step")),
        *(("10.2", (n - 1, name)) for name in ("step", "base", "warm", "decay", "rate", "batches")),
        *(("10.2", (rank, "epoch")) for rank in range(n - 1) if n > 2),
        *(("10.2", said) for said in (("epoch", n - 1), "epoch", n - 1, (n, "epoch"))),
        *(("10.3", (n - 1, line)) for line in (3, 9, 10, 12, 13, 14, 0, "share")),
        *(("10.3", (rank, 11)) for rank in (*range(n - 1), n)),
        *(("10.4", of) for of in ((2, 8), (7, 2), (9, 2), (10, 2), (11, 2), (8, 0), (8, 3), 8)),
    ]
    if n > 2:
        wrong.append(("6.2", (alike, everywhere(n, n - 1))))
    for name, answer in wrong:
        verdict = check(name, answer)
        assert not verdict.passed, (name, answer, verdict)


def test_a_model_that_was_not_trained_is_told_so(n: int) -> None:
    verdict = check("6.3", (everywhere(n, "untrained"), shared_out(n)))
    assert "as it was before the loop" in verdict.text


def test_an_answer_in_the_other_order_is_told_so(n: int) -> None:
    for name, answer in (("10.2", ("epoch", n - 1)), ("10.3", (11, n - 1))):
        assert "the rank comes first" in check(name, answer).text
