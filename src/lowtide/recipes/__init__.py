"""What transformers need, built from regions: which sub-module of which layer gets which answer.

Holds no engine. Law: a recipe only wraps modules, so everything it does can be undone by unwrapping.
"""
