"""Starting the ranks of a model: through torchrun from a shell, or as a function call from a notebook."""
