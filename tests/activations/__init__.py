"""Tests of the tape, the wrappers and their call mode."""
