"""Predictions for the shown strategy, and the planner's choice.

`predictor` predicts; `prediction_pictures` and `memory_picture` draw the result. `planner_section` runs the planner in
a thread and `plan_html` explains its plan. `machine_bar` and `machine_factors` change the machine. `offline_trainer`
describes a model without engines. `sweep_figures` draws ``wb.planner.simulate``.
"""
