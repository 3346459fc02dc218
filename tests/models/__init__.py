"""Whole models under each mode: the same training, bit by bit, and what is computed again."""
