"""What ranks print and raise, as one account: alike lines once, floods folded, all of it on disk.

`merging`, `lines` and `bars` are pure; `listeners` bring output while it comes, `log` keeps it, `tracebacks` tells of
failures, `progress` of a session that starts.
"""
