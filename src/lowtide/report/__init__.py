"""What was kept, recomputed, swapped and refused, and why."""
