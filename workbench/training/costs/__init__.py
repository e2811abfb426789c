"""What a model and a machine cost: numbers for the planner, which loads no torch.

`counting` watches one forward on metadata, `layer_costs` makes costs of layers of it, `heads` finds how many a
model has, `dry_run` counts what the real boxing plans of all ranks send; `measuring` is what this machine can do,
by the `stopwatch`.
"""
