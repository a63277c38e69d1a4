"""Other runtimes as sides of a comparison. They are yardsticks, each in a folder of its own, and no dependencies."""
