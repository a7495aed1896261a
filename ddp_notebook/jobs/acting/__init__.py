"""Acts on a prepared job that was taken over (`%ddp_attach PID --take-over`).

control.py          The same for programs and shells: answers are JSON.
taken_over.py       Pauses, steps and ends its ranks, and gives them back.
"""

from ddp_notebook.jobs.acting.taken_over import TakenOver, words

__all__ = ["TakenOver", "words"]
