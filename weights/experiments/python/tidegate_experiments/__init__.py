"""Experiments on attention that no product code needs; `python -m tidegate_experiments --help`.

They import the trainer (`tidegate_training`); nothing there imports them. randomized -> bidirectional -> encoder;
compare; sequences -> listops and passages -> classify; pairs -> translate; probe.
"""
