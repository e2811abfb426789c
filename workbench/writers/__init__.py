"""Writers of logs: what passes the steps of a run on to where people keep their logs.

`protocol` says what a writer is. `kinds` has the five that are chosen by name. `choose` reads ``"tensorboard:runs/"``.
`run_log` writes a run in a thread of its own, so that no writer can stop or delay a run.
`profile_files` writes a profile, with the events of all ranks.
"""
