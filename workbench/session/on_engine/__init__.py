"""What runs on an engine; loads nothing of the notebook's side. ``session/engine.py`` is its front.

`shell` is the request that an engine runs now, `values` and `failures` what a cell's last expression and its
exceptions become, `modes`, `waits` and `imports` let an interrupt end it cleanly; `control` answers while the main
thread is busy, with `assist`, `debug` and `orders`; `tensor_picture` and `tensor_table` draw a global tensor, `bars`
sends tqdm's progress bars.
"""
