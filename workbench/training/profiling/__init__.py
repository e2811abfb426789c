"""``wb.debug.profile``: torch's profiler on all ranks, with exchanges and actions, as one file and one table.

`exchanges` times the calls of a transport. `torch_events` reads torch's profiler. `memory_curve` measures memory by
kind over one step. `recording` holds what a rank has done in some steps, `rank_profiler`
counts steps and records some of them, `merging` brings the ranks together, `armed` is for
the engines of a notebook.
"""
