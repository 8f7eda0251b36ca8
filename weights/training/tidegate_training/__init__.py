"""Trains RFA-Gate decoders and writes the checkpoint folders that Tidegate serves.

Import order of the main modules: rfa -> model -> (data, optim) -> train -> export, fixtures. For the command line, see
`python -m tidegate_training --help`.
"""
