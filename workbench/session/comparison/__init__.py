"""Strategies tried on the engines of a session.

`compare` is ``wb.compare``. `subject` checks the job before any engine starts. `comparison` runs it on the engines,
`checker` compares runs with one device, `run_records` computes their figures, `training_on_engine` runs there.
`saved_runs` keeps runs on disk, `machine` describes the hardware and versions.
"""
