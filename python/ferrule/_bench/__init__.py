"""Benchmarks of models relative to the ceilings of the machine.

`measure` runs the model and `machine` the probes of the ceilings, `record` relates the figures of both, and `report`,
`compare` and `plot` show them. `ferrule bench` is the command line.
"""
