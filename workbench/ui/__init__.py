"""The notebook's views: the panel, the live view, pictures of tensors and plans, and the HTML report.

Nothing here runs on engines.
"""
