"""Training runs that can be compared.

`job` is what is trained, apart from the strategy, `job_checks` whether it can be; `train` runs it under one;
`live_run` does so while it reports and takes commands, `step_metrics` brings the steps of all ranks together,
`layer_times` times layers in a few of them; `user_loops` is ``wb.log``, for loops of one's own.
"""
