"""How a strategy is carried out on a module: ``state`` is what was done, ``layouts`` what lies where, ``spreading`` the
parameters and buffers, ``doors`` the boxing at layers. ``runtime/parallel.py`` puts them together.
"""
