"""Merges what ranks print and raise: equal lines appear once, floods are folded, and the whole output is on disk.

`merging`, `lines` and `progress_bars` are pure. `listeners` receive output while a request runs, and `log` writes it to
disk. `tracebacks` describes failures. `start_progress` shows the start of a session.
"""
