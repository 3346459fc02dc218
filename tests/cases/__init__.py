"""What public users of other systems once ran into, as tests: programs, ways to wrap, and their product."""
