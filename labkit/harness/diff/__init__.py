"""Records of two times held against each other, case by case."""
