"""Other runtimes as sides of a comparison. They are yardsticks and no dependencies, each in a folder of its own."""
