"""How bytes move: one tensor, what moves together, copies in flight, and the lower tiers."""
