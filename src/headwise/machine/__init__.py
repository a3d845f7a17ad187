"""The processor: its class, and the sizes from which headwise's own paths are faster than torch's.

- `python_processes`: starts of Python that import nothing from the working folder
- `capabilities`: processor, class, usable cores, memory
- `takeover_points`: the table of sizes by class of processor
"""
