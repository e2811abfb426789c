"""The strategy that is edited.

`state` holds it with its mistakes and undo, `edit_rows` changes its rows, `grouping` folds equal blocks into one row,
`choices` names what a layer does, `fixes` corrects mistakes.
"""
