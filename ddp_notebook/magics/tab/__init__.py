"""Answers for Tab and Shift-Tab, on the line of a magic and in a cell for ranks.

completers.py  What Tab offers for the values of options: rank sets, lists, files, variables.
completion.py  Tab completion on the line of a magic: its options, and the values they take.
rank_names.py  Tab and Shift-Tab in a `%%ddp` cell: what the ranks' variables are.
"""
