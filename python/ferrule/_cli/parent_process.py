"""Process id of the parent, read before any slow import: the parent may exit meanwhile."""

import os

PARENT_PID = os.getppid()
