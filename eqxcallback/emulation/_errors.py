"""The errors of kernels that cannot be emulated."""


class NotEmulated(Exception):
    """This machine, or the emulator, cannot run the kernel, which may be right. The text says why."""
