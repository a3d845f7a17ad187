"""Kills and full disks at random points of every command that writes: `python -m crashes`, with
tests/ on PYTHONPATH.

`workload` lists the commands, `injection` runs one in a forked process and ends it or fills its
disk, `trials` checks what is left. `full_disk.c` is a library that is loaded before libc, and makes
writes fail once a number of bytes has been written.
"""
