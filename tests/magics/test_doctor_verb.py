"""`%ddp_doctor` in a real shell: its value, its options, and what the ranks say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import session_of

from ddp_notebook.doctor import examination as facts
from ddp_notebook.errors import NoSession
from ddp_notebook.model.doctor import DoctorReport, Verdict

TORCH = {
    "torch": "2.13.0",
    "distributed": True,
    "gloo": True,
    "nccl": False,
    "environment": {"RANK": "0"},
}


@pytest.fixture(autouse=True)
def no_python_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real question is asked in tests/unit; it takes seconds."""
    monkeypatch.setattr(facts, "torch_facts", lambda: TORCH)


def checks_of(report: DoctorReport) -> dict[str, tuple[Verdict, str]]:
    return {check.name: (check.verdict, check.found) for check in report.checks}


def test_the_value_is_a_report(shell: Any) -> None:
    report = shell.run_cell("r = %ddp_doctor -n 2 --backend gloo\nr").result
    assert isinstance(report, DoctorReport)
    assert (report.world_size, report.backend) == (2, "gloo")
    assert checks_of(report)["torch"][0] is Verdict.OK


def test_without_a_number_it_is_as_many_ranks_as_ddp_init_starts(shell: Any) -> None:
    assert shell.run_line_magic("ddp_doctor", "").world_size == 4


def test_json_is_printed_and_can_be_read_back(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    result = shell.run_cell("%ddp_doctor -n 1 --json")
    assert result.success
    assert result.result is None
    assert json.loads(capsys.readouterr().out)["world_size"] == 1


def test_a_backend_that_cannot_be_had_is_a_failure(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    report = shell.run_line_magic("ddp_doctor", "-n 2 --backend nccl")
    assert checks_of(report)["devices"] == (
        Verdict.FAILURE,
        "--backend nccl needs GPUs, and none is visible here (nvidia-smi and CUDA_VISIBLE_DEVICES)",
    )


def test_ranks_that_run_are_asked(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(shell)
    ranks = {rank: {**TORCH, "environment": {"RANK": str(rank)}} for rank in range(3)}
    ranks[2]["torch"] = "2.6.0"
    monkeypatch.setattr(type(session), "running", property(lambda _: True))
    monkeypatch.setattr(session.overview, "rank_facts", lambda: ranks, raising=False)
    session.record.begin(3)
    report = shell.run_line_magic("ddp_doctor", "")
    assert report.world_size == 3
    assert checks_of(report)["versions on ranks"] == (
        Verdict.FAILURE,
        "torch: rank 2 has 2.6.0, ranks 0 and 1 have 2.13.0",
    )


def test_ranks_that_cannot_be_asked_are_left_alone(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise NoSession("%ddp_doctor")

    session = session_of(shell)
    monkeypatch.setattr(type(session), "running", property(lambda _: True))
    monkeypatch.setattr(session.overview, "rank_facts", refuse, raising=False)
    session.record.begin(2)
    report = shell.run_line_magic("ddp_doctor", "")
    assert report.world_size == 2
    assert "versions on ranks" not in checks_of(report)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            "%ddp_doctor -n 0",
            "UsageError: World size 0 is too small: it must be 1 or more. "
            "Type: %ddp_doctor --world-size 4",
        ),
        ("%ddp_doctor --master-port 70000", "UsageError: --master-port 70000 is not a port"),
        (
            "%ddp_doctor --backend mpi",
            "UsageError: --backend is auto, gloo or nccl, not 'mpi'",
        ),
        (
            "%ddp_doctor now",
            "UsageError: %ddp_doctor does not take now. "
            "For example: %ddp_doctor --world-size 4   (all options: %ddp_doctor -h)",
        ),
    ],
)
def test_wrong_input_says_what_to_type(
    shell: Any, capsys: pytest.CaptureFixture[str], call: str, expected: str
) -> None:
    capsys.readouterr()
    assert not shell.run_cell(call).success
    shown = capsys.readouterr()
    said = (shown.out + shown.err).strip()
    assert said.startswith(expected)
    assert "Traceback" not in said


def test_it_has_help(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert shell.run_cell("%ddp_doctor -h").success
    assert "usage: %ddp_doctor" in capsys.readouterr().out
