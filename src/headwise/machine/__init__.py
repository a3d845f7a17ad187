"""Capabilities of the machine, and the sizes from which headwise's own paths are faster than
torch's on it.

Reading order:

- `python_processes`: starts of Python that import nothing from the working folder
- `capabilities`: processor, instruction sets, cores, caches, NUMA nodes, and the class of machine
- `takeover_points`: the smallest sizes from which own paths run, from a table per class or from the
  calibration that
  `headwise bench --calibrate` keeps in the user's cache folder
"""
