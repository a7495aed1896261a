"""The exercises of notebook 4: the right answers pass, wrong ones are told what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from answers import assert_right, assert_wrong

OWN = {"ddp": 0.7, "total": 0.8, "own": 0.0}
MEAN = {"ddp": 1e-7, "total": 0.75, "own": 0.7}
SUM = {"ddp": 3.0, "total": 1e-7, "own": 2.0}
OTHER = {"ddp": 0.4, "total": 0.5, "own": 0.3}

SENT = [
    (["6.weight", "6.bias", "4.weight", "4.bias", "2.weight", "2.bias"], 1164),
    (["0.weight", "0.bias"], 130),
]
FIRST, LAST = SENT[0][0], SENT[1][0]

ACCUMULATED = {"ddp": 1e-7, "fourfold": 0.75, "own": 0.6}
FOURFOLD = {"ddp": 3.0, "fourfold": 1e-7, "own": 2.0}


def everywhere(value: Any) -> dict[int, Any]:
    return dict.fromkeys(range(4), value)


def norms(own: float, after: float) -> dict[int, list[float]]:
    return {**everywhere([0.0, after]), 3: [own, after]}


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("4.1", everywhere(MEAN)),
        ("4.2", (FIRST, SENT)),
        ("4.2", (tuple(reversed(FIRST)), SENT)),
        ("4.2", (", ".join(FIRST), SENT)),
        ("4.3", (1, 3, [1, 3, 3])),
        ("4.4", (everywhere(ACCUMULATED), everywhere(1))),
        ("4.5", everywhere("averaged")),
        ("4.6", (0.25, norms(0.32, 0.08))),
        ("4.6", (1 / 4, norms(4, 1.004))),
    ],
)
def test_the_right_answer_passes(name: str, answer: Any) -> None:
    assert_right(name, answer)


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("4.1", everywhere(None), "in place and returns None"),
        ("4.1", everywhere([1.0, 2.0]), "one long tensor"),
        ("4.1", everywhere({"ddp": 0.0}), "leave the cell"),
        ("4.1", everywhere(SUM), "rank 0 has the sum"),
        ("4.1", everywhere(OWN), "still has its own"),
        ("4.1", {**everywhere(MEAN), 2: OWN}, "rank 2 still"),
        ("4.1", everywhere(OTHER), "neither the mean"),
        ("4.1", 7, "the values of all ranks"),
        ("4.2", (3, SENT), "a list of names"),
        ("4.2", ([], SENT), "a list of names"),
        ("4.2", (FIRST, []), "no bucket was seen"),
        ("4.2", (["7.weight"], SENT), "'7.weight' is not a parameter"),
        ("4.2", (FIRST + LAST, SENT), "all of them"),
        ("4.2", (LAST, SENT), "these come last"),
        ("4.2", (["6.weight", "0.weight"], SENT), "some are not"),
        ("4.2", ([*FIRST, "0.bias"], SENT), "too many"),
        ("4.2", (FIRST[:4], SENT), "stays open"),
        ("4.3", (3, 3, [1, 3, 3]), "order of gradients is not known"),
        ("4.3", (8, 3, [1, 3, 3]), "not 8"),
        ("4.3", (1, 8, [1, 3, 3]), "shares its bucket"),
        ("4.3", (1, 4, [1, 3, 3]), "the last layer alone"),
        ("4.3", (1, 6, [1, 3, 3]), "never cut"),
        ("4.3", (1, 1, [1, 3, 3]), "long before the last gradient"),
        ("4.3", (1, 2, [1, 3, 3]), "start a new bucket"),
        ("4.3", (1, 2.5, [1, 3, 3]), "a whole number"),
        ("4.4", (everywhere(ACCUMULATED), everywhere(0)), "never communicated"),
        ("4.4", (everywhere(ACCUMULATED), everywhere(4)), "The *forward*"),
        ("4.4", (everywhere(ACCUMULATED), everywhere(2)), "Once is enough"),
        ("4.4", (everywhere(FOURFOLD), everywhere(1)), "four times too large"),
        ("4.4", (everywhere({**OTHER, "fourfold": 0.5}), everywhere(1)), "exactly once"),
        ("4.5", everywhere("no DDP object but Routed"), "Return DDP"),
        (
            "4.5",
            everywhere("step 2 raised: Expected to have finished reduction in the prior"),
            "rank 0: step 2 raised: gradients of the step before",
        ),
        ("4.5", everywhere("not averaged"), "differ between ranks"),
        ("4.5", everywhere("step 1 raised: something else"), "something else"),
        ("4.6", (1, norms(0.32, 0.08)), "that *have* a gradient"),
        ("4.6", (0, norms(0.32, 0.08)), "it takes part in the mean"),
        ("4.6", (0.5, norms(0.32, 0.08)), "What do the other ranks"),
        ("4.6", (0.25, norms(0.0, 0.08)), "run the cell that measures"),
        ("4.6", (0.25, everywhere(3)), "leave the cell"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(name: str, answer: Any, said: str) -> None:
    assert_wrong(name, answer, said)
