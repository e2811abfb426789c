"""A whole training step as one local program.

``recording`` writes down what a run of it does, ``program`` replays that, ``optimizer_steps`` lets optimizers step as
they are, ``step`` is what ``wb.capture`` returns.
"""
