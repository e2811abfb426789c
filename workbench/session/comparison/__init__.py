"""Strategies tried on the engines of a session.

`compare` is ``wb.compare``, `subject` what is known before any engine runs, `comparison` the job on the engines with
its one-device runs, `training` what an engine runs for it; `saved_runs` keeps runs on disk, `machine` says what they
ran on.
"""
