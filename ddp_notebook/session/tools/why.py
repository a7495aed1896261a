"""What is wrong with the ranks now: gathers a case of what they run, and has it diagnosed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_notebook.diagnosis import diagnose_run
from ddp_notebook.model import Case, Diagnosis
from ddp_notebook.session.runs import post_run

if TYPE_CHECKING:
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.setup.set_up import SetUp


class Why:
    """Diagnoses the ranks of a session; from any thread, any time."""

    def __init__(self, runs: RunRegistry, set_up: SetUp) -> None:
        self._runs = runs
        self._set_up = set_up

    def diagnose(self) -> Diagnosis:
        """`Session.why`."""
        diagnosis = diagnose_run(self.case("%ddp_why"))
        current = self._runs.current
        if diagnosis.findings or current is None or self._set_up.half_way:
            return diagnosis
        wrong_result = post_run.examine(current.run, current.cluster, current.logs)
        if wrong_result is None:
            return diagnosis
        return replace(diagnosis, findings=wrong_result.findings)

    def case(self, verb: str) -> Case:
        """What is known of the ranks, and of what they run or ran last, as it is now.

        Raises NoSession, SessionLost.
        """
        bring_up = self._set_up.need(verb)
        script, current = self._set_up.script, self._runs.current
        if script is not None:
            return script.look()
        if current is not None and not self._set_up.half_way:
            return current.look(as_script=False)
        return bring_up.look()
