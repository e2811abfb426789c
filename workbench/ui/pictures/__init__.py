"""Pictures as pure functions, data in, SVG out: a matrix product, a network, a boxing plan, stages, a timeline."""
