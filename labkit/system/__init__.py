"""Files, processes and the terminal: helpers that all rooms share and that know nothing about models."""
