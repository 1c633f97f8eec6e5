"""Models over several workers: processes of this machine (`processes`) or actors of a Ray cluster (`ray_actors`).

Pipeline stages divide the layers, and the workers of a stage divide the rows of its matrices (tensor parallelism). The
engine schedules in this process. A worker gets token ids, positions and hidden states over a socket, never text.
"""
