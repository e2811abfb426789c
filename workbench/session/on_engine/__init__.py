"""The engine's side of a session. It imports nothing of the notebook's side; users import ``workbench.session.engine``.

`shell` knows the request that runs now, and its commands. `displayed_values` and `failures` send a cell's last
expression and its exceptions. `torch_modes`, `interruptible_waits` and `deferred_interrupts` let an interrupt end a
cell cleanly. `control` answers while the main thread is busy, with `completion` and `debugger`. `tensor_html` and
`tensor_table` draw a global tensor. `progress_bars` sends tqdm's bars.
"""
