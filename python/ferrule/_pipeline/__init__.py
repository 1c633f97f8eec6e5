"""Pipeline stages in other processes of this machine.

The engine schedules in this process. A stage gets token ids, positions and hidden states over a socket, never text.
"""
