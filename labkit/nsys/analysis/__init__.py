"""What a trace says: work projected on ranges and stages, steps taken apart, two captures explained."""
