"""Starting the ranks of tensor parallelism: through torchrun from a shell, or as a function call from a notebook."""
