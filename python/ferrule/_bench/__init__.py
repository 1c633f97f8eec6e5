"""Benchmarks of models, relative to the limits of the machine.

`measure` runs the model, `machine` measures the limits (ceilings) of the machine, and `record` combines the figures of
both. `report`, `compare` and `plot` show a record. The command line is `ferrule bench`.
"""
