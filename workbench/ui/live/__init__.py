"""A run in progress: its state, four plots, the timeline and the log.

`run_view` is the page of a run. `poller` asks the run for messages; `history` stores them in bounded memory.
`live_figure` (with `figure_layout`, `figure_traces`, `overlays`, `figure_widget`) draws it with plotly, `live_picture`
as SVG without a kernel. `timeline_bars` has a step's actions, and exports them. `live_view` is ``wb.LiveView``.
"""
