"""Tests of the recipes: what transformers need, built from regions."""
