"""What the panel foretells: predictions for the rows that are shown, and the planner's choice.

`predicting` makes a prediction, `predictions` draws it; `planner_part` searches beside the notebook and `plan_view`
explains; `machine_bar` and `assumed` change the machine; `paper` knows a model without a cluster, `sweep_figures`
draws ``wb.planner.simulate``.
"""
