"""A whole training step as one local program.

``recorder`` records what a run of it does, ``trace`` replays that, ``compiled`` compiles parts of it,
``optimizer_steps`` lets optimizers step as they are, ``step`` is what ``wb.capture`` returns.
"""
