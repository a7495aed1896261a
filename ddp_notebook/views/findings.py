"""A diagnosis and a step table in the forms that a notebook asks for."""

from __future__ import annotations

from ddp_notebook.model import Diagnosis, StepTable
from ddp_notebook.views import findings_html, findings_text


def bundle(value: Diagnosis | StepTable) -> dict[str, str]:
    """The value as text and as HTML."""
    if isinstance(value, Diagnosis):
        text, html = findings_text.diagnosis(value), findings_html.diagnosis(value)
    else:
        text, html = findings_text.step_table(value), findings_html.step_table(value)
    return {"text/plain": text, "text/html": html}
