"""Benchmarks of models relative to the ceilings of the machine.

`measure` runs the model and `machine` measures the ceilings; `record` combines the figures of both; `report`, `compare`
and `plot` show them. The command line is `ferrule bench`.
"""
