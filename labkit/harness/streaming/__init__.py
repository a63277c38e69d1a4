"""The best batch for weights that do not fit into memory: predicted from a few rates, and measured."""
