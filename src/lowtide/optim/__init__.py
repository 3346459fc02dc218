"""What an optimizer holds: state and master weights, resident only while they are needed."""
