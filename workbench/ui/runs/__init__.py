"""Finished runs beside each other.

`rows` is the comparison as plain data, `table` its widget, `tables` its HTML and text; `scatter` and
`scatter_picture` show memory against throughput, `report` is the page that stands alone; `running` and `trainer`
are the panel's runs, `showing` is ``wb.draw.runs``.
"""
