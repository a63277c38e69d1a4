"""Memory that steps read and write: key/value caches, and the slots that they borrow on a GPU."""
