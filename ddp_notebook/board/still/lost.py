"""Hides what Jupyter says of a widget without a model, where HTML stands for the widget."""

from __future__ import annotations


def hidden_beside(mark: str) -> str:
    """A style sheet that hides lost widgets in a cell's output that has an element of class `mark`.

    Where a notebook is opened again, there is no model, and JupyterLab says so in words in place of
    the widget: nothing else makes a widget's view that has no element in it.
    """
    view = "> .jp-OutputArea-output.jupyter-widgets"
    lost = f".jp-OutputArea-child:has({view}):not(:has({view} *))"
    return f"<style>.jp-OutputArea:has(.{mark}) > {lost} {{ display: none }}</style>"
