"""The fault lab: what goes wrong in set-up, each as data that can be injected, seen and repaired.

fault.py      what a fault is
catalogue.py  every fault: what is changed on which rank, what should be found, two sentences
two_hosts.py  those that need a second host
jobs/         training scripts with a mistake in them; with DDP_FAULT=0 they are right
"""

from ddp_notebook.faults.catalogue import FAULTS
from ddp_notebook.faults.fault import Fault, Kind, TwoHosts, job_path

__all__ = ["FAULTS", "Fault", "Kind", "TwoHosts", "job_path"]
