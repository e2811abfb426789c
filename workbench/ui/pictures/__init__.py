"""Draws matrix products, networks, boxing plans, stages and timelines by pure functions: data in, SVG out."""
