"""Training runs that can be compared.

`job` holds model, data, loss and optimizer, apart from the strategy. `job_checks` checks them. `train` runs a job under
a strategy. `live_run` reports its steps and follows commands. `step_metrics` collects the steps of all ranks.
`layer_times` times layers in a few steps. `user_loops` is ``wb.log``, for users' own loops.
`first_difference` (with `recorded_values`) finds where a step parts from one device.
"""
