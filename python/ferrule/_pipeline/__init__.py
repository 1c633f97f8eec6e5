"""Pipeline stages in other processes: on this machine (`processes`) or on the hosts of a Ray cluster (`ray_actors`).

The engine schedules in this process. A stage gets token ids, positions and hidden states over a socket, never text.
"""
