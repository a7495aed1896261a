"""How the doctor's report is shown, and the doctor in a shell."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import jsonschema
import pytest
from doctor_cases import FAILURE, OK
from pages import Page

from ddp_notebook import doctor as package
from ddp_notebook.model.doctor import Check, DoctorReport
from ddp_notebook.rank.inspect.facts import excerpt
from ddp_notebook.views import doctor

# --------------------------------------------------------------------------- the report

REPORT = DoctorReport(
    (
        Check.ok("Python", "3.12.1"),
        Check.failure("port 29500", "in use by pid 8 (\x1b[31mpython\x1b[0m <x> & y)", "kill 8"),
        Check.warning("cores", "4 ranks\nshare 2", "For timings: -n 2"),
        Check.ok("torch", "2.7.0"),
    ),
    world_size=4,
)

FINE = DoctorReport((REPORT.checks[0],), world_size=1, backend="gloo")


def test_the_worst_verdict_is_that_of_the_report() -> None:
    assert (REPORT.worst, REPORT.ok, REPORT.count(OK)) == (FAILURE, False, 2)
    assert (FINE.worst, FINE.ok) == (OK, True)
    assert DoctorReport((REPORT.checks[2],)).ok, "a warning is no failure"
    assert DoctorReport(()).worst is OK


def test_the_headline_says_whether_ddp_can_work() -> None:
    assert REPORT.headline == (
        "DDP cannot work here as it is (4 ranks, backend auto): 1 failure, 1 warning in 4 checks"
    )
    assert FINE.headline == "DDP can work here (1 rank, backend gloo): 1 check, all ok"


def test_a_report_is_json() -> None:
    wire = json.loads(str(REPORT))
    assert wire == REPORT.to_json()
    schema = Path(package.__file__).with_name("schema.json")
    jsonschema.validate(wire, json.loads(schema.read_text()))
    assert (wire["ok"], wire["worst"], wire["world_size"]) == (False, "failure", 4)
    assert wire["checks"][2] == {
        "name": "cores",
        "verdict": "warning",
        "found": "4 ranks\nshare 2",
        "remedy": "For timings: -n 2",
    }


def test_the_text_is_exactly_this() -> None:
    assert doctor.text(REPORT) == dedent(
        """\
        DDP cannot work here as it is (4 ranks, backend auto): 1 failure, 1 warning in 4 checks

        verdict    check       found
        ─────────  ──────────  ────────────────────────────────
        ✗ failure  port 29500  in use by pid 8 (python <x> & y)
                               → kill 8
        ! warning  cores       4 ranks share 2
                               → For timings: -n 2
        ✓ ok       Python      3.12.1
        ✓ ok       torch       2.7.0"""
    )
    assert doctor.text(DoctorReport(())) == "DDP can work here: 0 checks, all ok"


def test_long_words_are_folded_and_stay_within_the_width() -> None:
    long = Check.failure("port", "in use by " + "python " * 30, "type --this-long-option " * 9)
    lines = doctor.text(DoctorReport((long,))).splitlines()
    assert max(map(len, lines)) <= 120
    assert not [line for line in lines if line.endswith("-")], "no option is cut"
    assert sum("→" in line for line in lines) == 1


def test_the_page_says_what_the_text_says_and_closes_what_it_opens() -> None:
    page = Page(doctor.html(REPORT))
    assert not page.unclosed
    assert page.texts == [
        REPORT.headline,
        *("verdict", "check", "found"),
        *("✗ failure", "port 29500", "in use by pid 8 (python <x> & y)", "→ kill 8"),
        *("! warning", "cores", "4 ranks share 2", "→ For timings: -n 2"),
        *("✓ ok", "Python", "3.12.1"),
        *("✓ ok", "torch", "2.7.0"),
    ]


def test_every_value_on_the_page_is_escaped() -> None:
    evil = '<script>alert(1)</script> & "x" \''
    page = doctor.html(DoctorReport((Check.warning(evil, evil, evil),), 1, evil))
    assert "script" not in Page(page).tags
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt; &amp;") == 4


def test_a_page_needs_no_style_sheet_and_no_theme() -> None:
    page = doctor.html(REPORT)
    assert "<style" not in page
    assert "var(" not in page
    assert Page(doctor.html(DoctorReport(()))).tags == ["div", "div"]


def test_the_colour_of_a_verdict_only_repeats_its_word() -> None:
    for check in REPORT.checks:
        words = Page(doctor.html(DoctorReport((check,)))).texts
        assert any(check.verdict.value in word for word in words[1:])


# --------------------------------------------------------------------------- in a shell


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in excerpt(os.environ)}
    return subprocess.run(
        [sys.executable, "-m", "ddp_notebook", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**kept, "PYTHONIOENCODING": "utf-8", **environment},
    )


def test_in_a_shell_the_text_is_printed_and_a_failure_is_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        shown = run_script("-n", "1", "--master-port", str(port))
    assert shown.returncode == 1
    assert shown.stdout.startswith("DDP cannot work here as it is (1 rank, backend auto): 1 fail")
    assert f"--master-port is in use by pid {os.getpid()}" in shown.stdout
    assert shown.stderr == ""


def test_in_a_shell_json_is_printed_and_no_failure_is_exit_code_0() -> None:
    shown = run_script("-n", "1", "--json", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert shown.returncode == 0, shown.stdout
    report = json.loads(shown.stdout)
    assert report["ok"] is True
    assert {"TORCH_DISTRIBUTED_DEBUG"} <= {check["name"] for check in report["checks"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "0"), "Type: ddp-notebook doctor --world-size 4"),
        (("--master-port", "70000"), "--master-port 70000 is not a port"),
        (("--backend", "mpi"), "invalid choice: 'mpi'"),
        (("--nonsense",), "unrecognized arguments: --nonsense"),
    ],
)
def test_in_a_shell_wrong_arguments_are_exit_code_3(
    arguments: tuple[str, ...], message: str
) -> None:
    shown = run_script(*arguments)
    assert shown.returncode == 3
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr
