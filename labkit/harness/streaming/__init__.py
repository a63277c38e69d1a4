"""What batch pays where weights do not fit into memory: predicted from a few rates, and measured."""
