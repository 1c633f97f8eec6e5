"""Process id of the parent, read before any slow import, during which the parent may exit."""

import os

PARENT_PID = os.getppid()
