"""The benches of `make bench`: they measure this machine against the targets, and write to profiles/."""
