"""What ranks print and raise, merged: equal lines once, floods folded, all of it on disk.

`merging`, `lines` and `progress_bars` are pure; `listeners` receive output while a request runs, `log` keeps it,
`tracebacks` describes failures, `start_progress` the start of a session.
"""
