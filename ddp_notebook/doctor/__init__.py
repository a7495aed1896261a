"""Whether DDP can work here, checked before anything starts.

examination.py  finds the facts and makes all checks in order: what `%ddp_doctor` calls
machine.py      checks of memory, processes, cores, the temporary folder, GPUs
network.py      checks of ports, host names, interfaces
schema.json     the form of the report as JSON
software.py     checks of versions, backends, environment variables, and whether the ranks agree

A check is a function of facts that returns a `Check` (model/doctor.py), so a test needs no broken
machine. Only examination.py inspects the machine.
"""

from ddp_notebook.doctor.examination import examine

__all__ = ["examine"]
