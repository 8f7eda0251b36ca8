"""Trains RFA-Gate decoders and writes the checkpoint folders that Tidegate serves.

rfa -> model -> (data, optim) -> train -> export, fixtures; `python -m tidegate_training --help`.
"""
