"""The fault lab: what goes wrong in set-up, each as data that can be injected, seen and repaired.

catalogue.py  every fault: what is changed on which rank, what should be found, two sentences
jobs/         training scripts with a mistake in them; with DDP_FAULT=0 they are right
"""

from ddp_notebook.faults.catalogue import FAULTS, Fault, Kind, job_path

__all__ = ["FAULTS", "Fault", "Kind", "job_path"]
