"""The strategy being edited.

`state` is it with its mistakes and undo, `editing` changes its rows, `grouping` folds blocks that are alike,
`placing` says in words what a layer does.
"""
