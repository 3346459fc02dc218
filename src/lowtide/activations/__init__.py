"""Regions, the tape that serves them, and the verbs that wrap modules."""
