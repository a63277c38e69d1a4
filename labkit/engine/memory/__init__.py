"""Memory that steps read and write: KV caches, and the slots that they borrow on a GPU."""
