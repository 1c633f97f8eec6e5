"""Starts a Ray cluster of one host with two CPUs, prints its address, and stops it when stdin is closed.

    python tests/ray_head.py

Ray's timeouts are extended, since a busy machine exceeds their defaults.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # else a token is written to the home directory
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_health_check_timeout_ms": "300000",
    "RAY_memory_monitor_refresh_ms": "0",  # no actor is killed for memory that other programs use
    "RAY_worker_niceness": "0",  # instead of 15: other programs would delay tests by minutes
    "RAY_worker_register_timeout_seconds": "300",
}
"""Environment of the cluster and of its drivers."""
ATTEMPTS = 10
"""Number of attempts to start; Ray gives up after 30 seconds, which is not configurable."""
OBJECT_STORE_BYTES = 100 << 20


def main() -> None:
    os.environ.update(SETTINGS)
    import ray

    start: Any = ray.init
    # The folders of tests are too long for the names of Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                start(num_cpus=2, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, _temp_dir=folder)
                break
            except Exception:
                ray.shutdown()
                if attempt == ATTEMPTS:
                    raise
        print(ray.get_runtime_context().gcs_address, flush=True)
        sys.stdin.read()
        ray.shutdown()


if __name__ == "__main__":
    main()
