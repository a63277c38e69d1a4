"""Analysis of traces: work projected on ranges and stages, steps split into parts, differences explained."""
