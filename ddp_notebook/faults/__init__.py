"""The fault lab: mistakes that are made when a process group is set up, as data.

fault.py      what a fault is
catalogue.py  all of them, one entry each
jobs/         the scripts of some of them; with DDP_FAULT=0 they have no mistake

A new fault is a new entry of catalogue.py, and a script if it is one; `session/tools/fault_lab.py`
injects it.
"""

from ddp_notebook.faults.catalogue import FAULTS
from ddp_notebook.faults.fault import Fault, Kind, TwoHosts

__all__ = ["FAULTS", "Fault", "Kind", "TwoHosts"]
