"""Whether the memory of a device holds what a step needs; if it does not, no time of the step is estimated."""

from __future__ import annotations

from dataclasses import dataclass

from .roofline import Device


@dataclass(frozen=True)
class MemoryShortfall:
    """A step that needs more memory than a device has: `contents` names what occupies the `needed_bytes`.

    >>> shortfall = MemoryShortfall("decode step", "weights and cache", 300 * 10**9, Device.from_name("h200"))
    >>> shortfall.missing_bytes, shortfall.min_devices
    (159000000000, 3)
    """

    step: str
    contents: str
    needed_bytes: int
    device: Device

    @property
    def missing_bytes(self) -> int:
        """Bytes that the device lacks."""
        return self.needed_bytes - int(self.device.memory)

    @property
    def min_devices(self) -> int:
        """Least number of devices that hold everything, if they divide it evenly."""
        return -(-self.needed_bytes // int(self.device.memory))

    def __str__(self) -> str:
        memory = format_gigabytes(int(self.device.memory))
        return (
            f"{self.device.description} is too small: {self.contents} need {format_gigabytes(self.needed_bytes)}, "
            f"{format_gigabytes(self.missing_bytes)} more than its {memory}, so no time is estimated ({self.step}); at "
            f"least {self.min_devices:,} such devices are needed"
        )


def find_shortfall(step: str, contents: str, needed_bytes: int, device: Device) -> MemoryShortfall | None:
    """Return by how much a device is too small; None if it is large enough."""
    return MemoryShortfall(step, contents, needed_bytes, device) if needed_bytes > device.memory else None


def format_gigabytes(count: int) -> str:
    """Format bytes in GB (10^9), or in MB if there are fewer.

    >>> format_gigabytes(16060522496), format_gigabytes(16777216)
    ('16.06 GB', '16.78 MB')
    """
    return f"{count / 1e9:,.2f} GB" if count >= 10**9 else f"{count / 1e6:,.2f} MB"
