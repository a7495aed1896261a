"""Sphinx's settings of the book; `ddp-notebook book` builds it."""

project = "ddp_notebook"
copyright = "the ddp_notebook authors"
extensions = ["myst_nb"]
root_doc = "index"
html_theme = "furo"
html_title = "ddp_notebook"
html_copy_source = False
html_show_sphinx = False
myst_heading_anchors = 4
nb_execution_mode = "off"  # the notebooks are shown as they were saved; the tests execute them
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
