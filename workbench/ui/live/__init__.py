"""A run while it goes on: state, four plots, the timeline, the log.

`part` is what a page shows; `poller` asks the run for news, `history` keeps it small with `curve`; `figure` (with
`layout`, `traces`, `widget`) draws it with plotly, `picture` without a kernel; `timeline_bars` and `timeline_rows`
are a step's actions, `chrome_trace` exports them; `own_live` is ``wb.LiveView``.
"""
