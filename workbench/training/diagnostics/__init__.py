"""Looking at a program while it runs: ``wb.debug.trace``, ``wb.debug.memory_report``, ``wb.debug.find_nonfinite``.

`trace` tells which line caused which boxing, `memory` counts a rank's bytes by kind and `reporting` shows those of
all, `nonfinite` looks for the first nan.
"""
