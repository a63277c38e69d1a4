"""What `make bench` runs: this machine measured against the targets, written to profiles/."""
