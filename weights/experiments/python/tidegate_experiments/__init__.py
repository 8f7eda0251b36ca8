"""Experiments on attention that no product code needs; see `python -m tidegate_experiments --help`.

They import the trainer (`tidegate_training`); the trainer does not import them. Import order of the modules: randomized ->
bidirectional -> encoder; compare; sequences -> listops and passages -> classify; pairs -> translate; probe.
"""
