"""What `check` says of answers to the exercises of notebook 9."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from answers import assert_right, assert_wrong

from ddp_notebook.workshop import check

Slurm = dict[str, str]


def tasks(nodes: str, places: list[tuple[int, int]]) -> list[Slurm]:
    """What Slurm tells each task, given the (host, place on it) of each."""
    return [
        {
            "SLURM_PROCID": str(task),
            "SLURM_NTASKS": str(len(places)),
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(node),
            "SLURM_JOB_NODELIST": nodes,
            "SLURM_JOB_ID": "123456",
        }
        for task, (node, local) in enumerate(places)
    ]


LAYOUTS = {
    "block": tasks("node[03-04]", [(0, 0), (0, 1), (1, 0), (1, 1)]),
    "cyclic": tasks("node[03,07]", [(0, 0), (1, 0), (0, 1), (1, 1)]),
    "uneven": tasks("gpu-a,gpu-b", [(0, 0), (0, 1), (0, 2), (1, 0)]),
}
FIRST = {"node[03-04]": "node03", "node[03,07]": "node03", "gpu-a,gpu-b": "gpu-a"}


def right(slurm: Slurm) -> dict[str, Any]:
    """The solution."""
    return {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "MASTER_ADDR": FIRST[slurm["SLURM_JOB_NODELIST"]],
        "MASTER_PORT": "18456",
    }


def but(**changed: Any) -> Callable[[Slurm], Any]:
    """The solution with other values; of a task where the value is a function of it."""

    def from_slurm(slurm: Slurm) -> dict[str, Any]:
        others = {n: v(slurm) if callable(v) else v for n, v in changed.items()}
        return {**right(slurm), **others}

    return from_slurm


def mapped(from_slurm: Callable[[Slurm], Any]) -> tuple[Any, Any]:
    """What the cells of the exercise pass to the check."""
    made = {name: [from_slurm(task) for task in told] for name, told in LAYOUTS.items()}
    return made, LAYOUTS


def formula(slurm: Slurm) -> str:
    """A rank that is computed, and right only when two tasks are on each host, in order."""
    return str(int(slurm["SLURM_NODEID"]) * 2 + int(slurm["SLURM_LOCALID"]))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("9.1", (2, 1)),
        ("9.1", [2, 1]),
        ("9.2", mapped(right)),
        ("9.2", mapped(but(MASTER_PORT="29500"))),
        ("9.3", "10.20.0.11"),
        ("9.4", "the store's port is shut"),
        ("9.5", (1024, 0.8)),
        ("9.5", (16 * 64, 0.2 * 4)),
    ],
)
def test_a_right_answer_passes(name: str, answer: Any) -> None:
    assert_right(name, answer)


@pytest.mark.parametrize(
    ("from_slurm", "said"),
    [
        (lambda slurm: None, "must return a dict"),
        (lambda slurm: {"RANK": slurm["SLURM_PROCID"]}, "task 0: WORLD_SIZE is missing"),
        (but(RANK=lambda slurm: int(slurm["SLURM_PROCID"])), "os.environ takes text only"),
        (but(RANK=lambda slurm: slurm["SLURM_LOCALID"]), "two hosts both have a rank 0"),
        (but(RANK=formula), "'cyclic', task 1: RANK is 2, and should be what Slurm says itself"),
        (but(WORLD_SIZE="2"), "How many tasks has the job?"),
        (but(LOCAL_RANK=lambda slurm: slurm["SLURM_PROCID"]), "a GPU of *this* host"),
        (
            but(LOCAL_RANK=lambda slurm: str(int(slurm["SLURM_PROCID"]) % 2)),
            "'cyclic', task 1: LOCAL_RANK is 1, and should be what Slurm says itself",
        ),
        (
            but(MASTER_ADDR=lambda slurm: "node0" + str(3 + int(slurm["SLURM_NODEID"]))),
            "MASTER_ADDR differs between tasks (node03, node04)",
        ),
        (but(MASTER_PORT=lambda slurm: "2950" + slurm["SLURM_PROCID"]), "MASTER_PORT differs"),
        (but(MASTER_ADDR="localhost"), "means another host on each host"),
        (but(MASTER_ADDR=lambda slurm: slurm["SLURM_JOB_NODELIST"]), "the whole list node[03-04]"),
        (but(MASTER_ADDR="node04"), "the first host of node[03-04] is another"),
        (but(MASTER_PORT=lambda slurm: slurm["SLURM_JOB_ID"]), "MASTER_PORT is '123456'"),
    ],
)
def test_what_is_wrong_with_a_function_for_slurm(
    from_slurm: Callable[[Slurm], Any], said: str
) -> None:
    verdict = check("9.2", mapped(from_slurm))
    assert not verdict.passed
    assert said in verdict.text


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("9.1", 5, "expected two values"),
        ("9.1", (1, 2), "in the other order"),
        ("9.1", (3, 1), "counted from 0"),
        ("9.1", (1, 1), "four ranks on each host"),
        ("9.1", (4, 0), "hosts are 0 to 3"),
        ("9.1", (2, 0), "that is rank 4"),
        ("9.2", mapped(right)[0], "leave the cells"),
        ("9.2", (mapped(right)[0], 3), "leave the cells"),
        ("9.2", ({"block": [{}]}, LAYOUTS), "not a dict for each task of the layout 'block'"),
        ("9.3", "127.0.0.1", "On node-b".lower()),
        ("9.3", "172.17.0.1", "node-b has this address, too"),
        ("9.3", "node-a", "not one of the choices"),
        ("9.4", "the ranks' own ports are shut", "has not come that far"),
        ("9.4", "MASTER_ADDR is a loopback address", "is not a loopback address"),
        ("9.4", "rank 0 does not run", "which it hosts"),
        ("9.5", 1024, "expected two values"),
        ("9.5", (64, 0.8), "one rank's"),
        ("9.5", (256, 0.2), "of the old job"),
        ("9.5", (512, 0.8), "over all 16 ranks"),
        ("9.5", (1024, 0.2), "With the old rate"),
        ("9.5", (1024, 0.05), "The rate grows with it"),
        ("9.5", (1024, 0.4), "square root"),
        ("9.5", (1024, 1.0), "By which factor"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong_with_it(name: str, answer: Any, said: str) -> None:
    assert_wrong(name, answer, said)
