"""Looking at a program while it runs: ``wb.debug.trace``, ``wb.debug.memory_report``, ``wb.debug.find_nonfinite``.

`boxing_trace` records which line caused which boxing. `memory` counts a rank's bytes by kind, and `memory_report` shows
those of all ranks. `nonfinite` looks for the first nan.
"""
