"""Front doors to trainers: each applies a ``MemoryConfig`` when training begins and undoes it when training ends.

The trainers are optional and imported late. Nothing else of the package imports this.
"""
