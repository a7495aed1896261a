"""What the doctor asks the system, and what it makes of all of it."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from doctor_cases import CPU_TORCH, FAILURE, OK, WARNING, expect, ranks

from ddp_notebook.doctor import examination as facts
from ddp_notebook.doctor import examine
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model.doctor import Check, DoctorReport
from ddp_notebook.rank.inspect.facts import driver_version, excerpt, gather

# --------------------------------------------------------------------------- facts


def test_a_port_that_is_listened_on_is_in_use_by_this_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert facts.try_port(port) == errno.EADDRINUSE
        holders = facts.holders_of(port)
    assert [holder.pid for holder in holders] == [os.getpid()]
    assert holders[0].command
    assert facts.try_port(port) == 0


def test_names_are_looked_up() -> None:
    assert "127.0.0.1" in facts.look_up("127.0.0.1").addresses
    assert facts.look_up("no-such-host.invalid", timeout_s=30).error
    assert facts.look_up("." * 300, timeout_s=30).error
    assert facts.look_up("localhost", timeout_s=0).error in ("", "no answer within 0 s")


def test_this_machine_has_a_loopback_that_works() -> None:
    assert any("127.0.0.1" in each.addresses for each in facts.interfaces().values())


def test_a_folder_that_cannot_be_written_to_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    expect(facts.check_temporary_folder, OK, "free")
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at-all")
    expect(facts.check_temporary_folder, FAILURE, "No such file or directory", "TMPDIR=/tmp")


def test_torch_is_asked_in_a_python_of_its_own() -> None:
    found = facts.torch_facts()
    assert found["torch_error"] == ""
    assert found["torch"] == gather()["torch"]
    assert found["distributed"] and found["gloo"]


def test_a_python_that_is_not_done_in_time_or_fails_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert facts.torch_facts(0.01) == {"torch_error": "importing it takes longer than 0 s"}
    monkeypatch.setattr(facts, "_ASK_TORCH", "raise SystemExit('libcudart is missing')")
    error = facts.torch_facts()["torch_error"]
    assert error == "a Python that imports it ends with 1: libcudart is missing"
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert facts.torch_facts()["torch_error"].startswith("/no/such/python cannot be started")


def test_a_rank_tells_what_it_runs_as_json() -> None:
    found = gather()
    assert json.loads(json.dumps(found)) == found
    assert found["pid"] == os.getpid()
    assert found["devices"] is None, "CUDA is not touched on a rank"


def test_a_rank_without_torch_says_why(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    shown = subprocess.run(
        [
            sys.executable,
            "-c",
            "from ddp_notebook.rank.inspect.facts import gather; print(gather())",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert "'torch' is not a package" in shown.stdout


def test_only_variables_of_distributed_training_leave_a_rank() -> None:
    environment = {"RANK": "0", "HOME": "/root", "NCCL_DEBUG": "INFO", "AWS_SECRET": "x"}
    assert excerpt(environment) == {"NCCL_DEBUG": "INFO", "RANK": "0"}


def test_the_drivers_version_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) == ""
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    assert driver_version(file) == "550.54.15"


# --------------------------------------------------------------------------- all of them


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No Python is started to be asked about torch, and the environment is bare."""
    monkeypatch.setattr(facts, "torch_facts", lambda: CPU_TORCH)
    for name in ("CUDA_VISIBLE_DEVICES", "MASTER_PORT", *excerpt(os.environ)):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def named(report: DoctorReport, name: str) -> Check:
    (found,) = [check for check in report.checks if check.name == name]
    return found


def test_a_healthy_machine_has_no_failure(quick: pytest.MonkeyPatch) -> None:
    report = examine(1)
    assert report.ok, str(report)
    assert report.world_size == 1
    assert len({check.name for check in report.checks}) == len(report.checks) >= 20


def test_the_environment_is_looked_at(quick: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        quick.setenv("MASTER_PORT", str(port))
        quick.setenv("GLOO_SOCKET_IFNAME", "nope0")
        report = examine(1)
    assert not report.ok
    assert f"MASTER_PORT is in use by pid {os.getpid()}" in named(report, f"port {port}").found
    assert named(report, "GLOO_SOCKET_IFNAME").verdict is FAILURE
    assert named(report, "rendezvous variables").verdict is WARNING


def test_a_port_that_is_asked_for_goes_before_that_of_the_environment(
    quick: pytest.MonkeyPatch,
) -> None:
    quick.setenv("MASTER_PORT", "29500")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = named(examine(1, master_port=port), f"port {port}").found
    assert found.startswith("--master-port is in use")


def test_a_file_that_hides_a_module_is_named(quick: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "queue.py").touch()
    quick.chdir(tmp_path)
    check = named(examine(1), "file names")
    expect(lambda: check, WARNING, "queue.py has the name of a module", "Rename it")


def test_nccl_without_a_gpu_is_a_failure(quick: pytest.MonkeyPatch) -> None:
    quick.setenv("CUDA_VISIBLE_DEVICES", "")
    report = examine(2, backend="nccl")
    assert named(report, "devices").verdict is FAILURE
    assert named(report, "backend nccl").verdict is FAILURE


def test_ranks_that_run_are_asked_instead_of_a_fresh_python(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(facts, "torch_facts", lambda: pytest.fail("a Python was started"))
    report = examine(2, rank_facts=ranks(2, torch="2.9.1"))
    assert named(report, "versions on ranks").verdict is FAILURE
    assert named(report, "torch").found.startswith("2.8.0+cu126")


def test_what_the_system_does_not_show_is_no_reason_to_stop(quick: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    quick.setattr(facts, "bytes_left", refuse)
    quick.setattr(facts, "shared_memory", refuse)
    report = examine(1)
    for name in ("memory", "/dev/shm"):
        expect(lambda name=name: named(report, name), WARNING, "could not be", "by hand")


def test_torch_that_is_missing_is_said_once(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(facts, "torch_facts", lambda: {"torch_error": "No module named 'torch'"})
    report = examine(1)
    assert named(report, "torch").verdict is FAILURE
    assert not [check for check in report.checks if check.name.startswith("backend")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "World size 0 is too small: .* Type: %ddp_doctor --world-size 4"),
        (
            {"world_size": 1, "backend": "mpi"},
            "--backend must be one of auto, gloo, nccl, not 'mpi'",
        ),
        ({"world_size": 1, "master_port": 70000}, "--master-port 70000 is not a port"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: Mapping[str, Any], message: str, quick: pytest.MonkeyPatch
) -> None:
    quick.setattr(facts, "torch_facts", lambda: pytest.fail("a Python was started"))
    with pytest.raises(UsageMistake, match=message):
        examine(**arguments)


def test_the_doctor_does_not_import_torch() -> None:
    code = (
        "import sys; from ddp_notebook.doctor import examine; examine(1)\n"
        "print('torch' in sys.modules, 'ipyparallel' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "False"]
