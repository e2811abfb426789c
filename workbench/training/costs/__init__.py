"""What a model and a machine cost: numbers for the planner, which loads no torch.

`work_counter` watches one forward on metadata, and `layer_costs` turns its counts into costs of layers.
`dry_run` counts what the boxing plans of all ranks send. `machine_times` measures this machine with the `stopwatch`.
"""
