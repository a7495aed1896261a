"""A benchmark of training steps as a notebook shows it: a figure, and what it says."""

from __future__ import annotations

import base64
import io
from typing import Any

from ddp_notebook.bench.steps.results import StepBenchResult
from ddp_notebook.views.bench import steps_html, steps_plots, steps_text


def bundles(result: StepBenchResult) -> list[dict[str, Any]]:
    """The figure and the tables, each in all its forms."""
    buffer = io.BytesIO()
    steps_plots.step_figure(result).savefig(buffer, format="png")
    figure = {
        "image/png": base64.b64encode(buffer.getvalue()).decode("ascii"),
        "text/plain": f"<figure: {steps_text.title(result)}>",
    }
    return [figure, {"text/plain": steps_text.text(result), "text/html": steps_html.html(result)}]
