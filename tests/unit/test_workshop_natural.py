"""Each exercise that does not depend on the number of ranks: how people write an answer does not
matter, and what people get wrong is wrong. The others are in `test_workshop_sizes.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_workshop_ch03 import DUPLICATE, HIDDEN, WRONG_PORT, found
from test_workshop_ch04 import ACCUMULATED, FIRST, FOURFOLD, LAST, MEAN, OTHER, OWN, SENT, SUM
from test_workshop_ch07 import ALPHA_US, CURVE, GB_PER_S
from test_workshop_ch08 import BEGUN, LOT, RUN
from test_workshop_ch09 import but, formula, mapped, right

from ddp_notebook.model import Board, Category, Diagnosis, RankState, Snapshot
from ddp_notebook.workshop import check

PIDS = (310, 311, 317, 318)
RANKS = tuple(RankState(rank, pid=pid) for rank, pid in enumerate(PIDS))
BOARD = Board("", (), (), Snapshot(RANKS))
NEXT = {rank: PIDS[(rank + 1) % 4] for rank in range(4)}
COUNTS = [1, 3, 3]
SLOW = {"A": "slow", "B": "stuck", "C": "stuck"}
STORE_SHUT = "the store's port is shut"
STOP, KIND = "if loss < 0.25:", "divergent-control-flow"


def everywhere(value: Any) -> dict[int, Any]:
    return dict.fromkeys(range(4), value)


def each(pids: dict[int, int], as_: Any) -> dict[int, Any]:
    return {rank: as_(pid) for rank, pid in pids.items()}


RIGHT: dict[str, list[Any]] = {
    "2.3": [(each(NEXT, as_), BOARD) for as_ in (str, int, "{}\n".format, lambda p: b"%d" % p)],
    "2.5": ["to each other", "To each other.", " to  each-other "],
    "3.1": [0, "rank 0", "0", np.int64(0)],
    "3.2": [
        (said, WRONG_PORT) for said in ("0-1", "0, 1", {0, 1}, (1, 0), "ranks 0 and 1", "[0, 1]")
    ],
    "3.3": [
        (said, HIDDEN)
        for said in (
            (1, "env-mismatch"),
            ["rank 1", Category.ENV_MISMATCH],
            (np.int64(1), "Env mismatch"),
            ("env-mismatch", 1),
        )
    ],
    "3.4": [found(DUPLICATE, (3,))],
    "3.5": [
        ("address-unresolved", "port-held"),
        {"port-held", "address-unresolved"},
        "port-held, address-unresolved",
        ["Port-held ", "address_unresolved"],
    ],
    "4.1": [everywhere(MEAN), everywhere({**MEAN, "ddp": 0.0}), everywhere({**MEAN, "ddp": 3e-5})],
    "4.2": [
        (said, SENT)
        for said in (
            set(FIRST),
            ",".join(FIRST),
            [f"module.{name}" for name in FIRST],
            tuple(FIRST),
        )
    ],
    "4.3": [(one, three, COUNTS) for one, three in ((1, 3), (1.0, "3"), (np.int64(1), [3]))],
    "4.4": [(everywhere(ACCUMULATED), everywhere(once)) for once in (1, 1.0, np.int64(1))],
    "4.5": [everywhere("averaged"), everywhere(" averaged"), ["averaged"] * 4],
    "5.1": [
        SLOW,
        {"a": "slow", "b": "stuck", "c": "stuck"},
        {"A": "Slow ", "B": "STUCK", "C": "stuck"},
    ],
    "6.4": ["C", "c", " C "],
    "7.1": [
        (a, b, CURVE) for a, b in ((300, 2.0), ("310", 1.9), (np.float64(250), torch.tensor(2.2)))
    ],
    "7.2": [(ms, ALPHA_US, GB_PER_S) for ms in (50.3, 50, np.float32(50.3), [50.3])],
    "7.3": [(35, 43.75), (35.0, 44), (np.float64(35), "43.75")],
    "7.4": [2, 2.0, "2", np.int64(2), "2 MB", "2MiB", "2 mb "],
    "7.5": [50, 50.0, 51, "50", "100/2", 51],
    "7.6": [(0.75, 6), (3 / 4, 6.0), ("75 %", 6), ("0.75", np.int64(6))],
    "8.2": [
        (line, kind)
        for line, kind in (
            ("    if loss<0.25:", KIND),
            ("if loss < 0.25", "divergent control flow"),
            ("if loss < 0.25:\n        break", KIND),
            ("break", "Divergent-Control-Flow"),
        )
    ],
    "8.3": [[9] * 4, (9, 9, 9, 9), [np.int64(9)] * 4],
    "8.4": [(BEGUN, RUN), ([3, 3, 2, 3], RUN), (each(BEGUN, np.int64), RUN)],
    "8.5": [(r, why, LOT) for r, why in ((2, LOT[1]), ("rank 2", "Too few images"), (2.0, LOT[1]))],
    "9.1": [(2, 1), [2, 1], divmod(5, 2), ("2", "1")],
    "9.2": [
        mapped(right),
        mapped(but(MASTER_PORT="29500", NODE_RANK="0")),
        mapped(lambda slurm: {**slurm, **right(slurm)}),
    ],
    "9.3": ["10.20.0.11", " 10.20.0.11", "10.20.0.11\n"],
    "9.4": [STORE_SHUT, "The store's port is shut.", "the  store's port is shut"],
    "9.5": [(1024, 0.8), [1024, 0.8], ("1024", np.float32(0.8)), (16 * 64, 4 * 0.2)],
}

WRONG: dict[str, list[Any]] = {
    "2.3": [
        (NEXT | {3: PIDS[3]}, BOARD),
        ({rank: PIDS[rank] for rank in range(4)}, BOARD),
        ({rank: PIDS[rank - 1] for rank in range(4)}, BOARD),
        (everywhere(PIDS[0]), BOARD),
        (each(NEXT, lambda pid: str(b"%d" % pid)), BOARD),
        (each(NEXT, lambda pid: f"I am process {pid}"), BOARD),
        (everywhere(""), BOARD),
        ({0: NEXT[0]}, BOARD),
        NEXT,
    ],
    "2.5": ["none at all", "only to the file", "none", "", "each", None],
    "3.1": [3, 2, 1, 4, -1, "join/0", None],
    "3.2": [(said, WRONG_PORT) for said in ("1", "0", "2-3", "all", "", "all but 1", 1.5)],
    "3.3": [
        (said, HIDDEN)
        for said in (
            (0, "env-mismatch"),
            (1, "missing-rank"),
            (1, "straggler"),
            (1, "rank-died"),
            (2, "duplicate-rank"),
            1,
            "",
        )
    ],
    "3.4": [
        Diagnosis(),
        HIDDEN,
        found(DUPLICATE, (2,)),
        found(Category.MISSING_RANK, (3,)),
        found(DUPLICATE, (2, 3)),
        found(Category.STRAGGLER, (3,), passing=True),
        "duplicate-rank",
    ],
    "3.5": [[], ["port-held"], ["all"], ["port-held", "missing-rank"], "duplicate-rank", None],
    "4.1": [everywhere(wrong) for wrong in (OWN, SUM, OTHER, None, [0.5] * 3, torch.ones(3))],
    "4.2": [
        (wrong, SENT) for wrong in (LAST, FIRST[:4], [*FIRST, "0.bias"], FIRST + LAST, [], "6")
    ],
    "4.3": [(a, b, COUNTS) for a, b in ((3, 1), (1, 1), (1, 4), (8, 8), (1, 2), (3, 3), (1, "x"))],
    "4.4": [
        (everywhere(ACCUMULATED), everywhere(0)),
        (everywhere(ACCUMULATED), everywhere(4)),
        (everywhere(ACCUMULATED), everywhere(2)),
        (everywhere(FOURFOLD), everywhere(1)),
        (everywhere(OTHER | {"fourfold": 0.5}), everywhere(1)),
        (everywhere(None), everywhere(0)),
    ],
    "4.5": [
        everywhere("no DDP object but Routed"),
        everywhere("no DDP object but NoneType"),
        everywhere("step 2 raised: Expected to have finished reduction in the prior iteration"),
        everywhere("not averaged"),
        everywhere("wrap raised TypeError: wrap() takes 0 positional arguments"),
        ["averaged"] * 3 + ["not averaged"],
        True,
    ],
    "5.1": [SLOW | {job: "slow" if job > "A" else "stuck"} for job in "ABC"] + ["slow", {}, None],
    "6.4": ["A", "B", "D", "", None, 3],
    "7.1": [
        (a, b, CURVE) for a, b in ((0.3, 2), (300, 2000), (3000, 2), (300, 0.2), (0, 0), ("", 2))
    ],
    "7.2": [(ms, ALPHA_US, GB_PER_S) for ms in (12.8, 400, 0.0503, 50300, 350, 0, "50 ms")],
    "7.3": [(20, 50), (43.75, 35), (40, 100), (35, 35), (17.5, 43.75), (35, 50), 35],
    "7.4": [0.1, 16, 64, 25, 0, "2 GB", None],
    "7.5": [60, 100, 10, 12, 0, -50, "fifty", 49],
    "7.6": [(75, 6), (0.25, 2), (4 / 3, 6), (0.75, 8), (6, 0.75), 0.75],
    "8.2": [
        (line, kind)
        for line, kind in (
            (STOP, "conditional-collective"),
            (STOP, "uneven-inputs"),
            ("if rank == 0:", KIND),
            ("loss.backward()", KIND),
            ("torch.manual_seed(rank)", KIND),
            ("", KIND),
            (22, KIND),
        )
    ],
    "8.3": [[9, 9, 10, 9], [100] * 4, [1] * 4, [9], [], "import torch", None],
    "8.4": [({rank: count + by for rank, count in BEGUN.items()}, RUN) for by in (-1, 1)]
    + [(everywhere(3), RUN), (everywhere(2), RUN), ([3, 3, 2], RUN), ({}, RUN), (BEGUN, None)],
    "8.5": [
        (2, "too few epochs", LOT),
        (2, "it crashed", LOT),
        (2, "another model", LOT),
        (1, LOT[1], LOT),
        (0, LOT[1], LOT),
        (2, "", LOT),
    ],
    "9.1": [(1, 2), (3, 2), (1, 1), (2, 0), (5, 0), 5, (2.5, 1)],
    "9.2": [
        mapped(wrong)
        for wrong in (
            lambda slurm: None,
            lambda slurm: dict(slurm),
            but(RANK=formula),
            but(RANK=lambda slurm: slurm["SLURM_LOCALID"]),
            but(WORLD_SIZE=4),
            but(LOCAL_RANK="0"),
            but(MASTER_ADDR="localhost"),
            but(MASTER_PORT=lambda slurm: slurm["SLURM_JOB_ID"]),
        )
    ],
    "9.3": ["127.0.0.1", "172.17.0.1", "10.20.0.12", "node-a", "", "localhost"],
    "9.4": [
        "the ranks' own ports are shut",
        "rank 0 does not run",
        "shut",
        "",
        None,
        "MASTER_ADDR is a loopback address",
    ],
    "9.5": [(64, 0.8), (256, 0.8), (1024, 0.2), (1024, 0.05), (1024, 0.4), (0.8, 1024), 1024],
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_passes_however_it_is_written(name: str) -> None:
    for answer in RIGHT[name]:
        verdict = check(name, answer)
        assert verdict.passed, (answer, verdict)
        assert verdict.text.startswith("right")


@pytest.mark.parametrize("name", WRONG)
def test_what_people_get_wrong_is_wrong_and_they_are_told_more_than_that(name: str) -> None:
    assert len(WRONG[name]) >= 5
    for answer in WRONG[name]:
        verdict = check(name, answer)
        assert not verdict.passed, answer
        assert len(verdict.text.split()) > 4, verdict
