"""The comparison of finished runs.

`table_rows` is the comparison as plain data, `table_widget` its widget, `render_table` its HTML and text.
`scatter_picture` shows memory against throughput, `curve_pictures` losses and throughput by step, `detail_pictures`
predictions and time by layer, `report` the page
that stands alone. `runs_section` follows the panel's runs, `trainer` starts them, and `runs_view` is ``wb.draw.runs``.
"""
