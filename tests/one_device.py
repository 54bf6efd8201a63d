"""The environment of programs that tests start, which have one device, as their users' have."""

import os
import re


def environment() -> dict[str, str]:
    """Without the devices that conftest.py asks for, and with what it does to compile in less time."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    return {**os.environ, "XLA_FLAGS": flags.strip()}
