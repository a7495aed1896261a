"""What communication costs: the plan, the loop each rank runs, and the statistics.

`plan` and `stats` are standard library only and run in the notebook's kernel; `loop` needs
torch and runs on the ranks.
"""
