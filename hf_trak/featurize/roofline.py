"""A bound on the rate of featurizing on a GPU that is not there, from what one batch makes it do."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hf_trak.modelout_functions.base import checked_choice

if TYPE_CHECKING:
    from hf_trak.runtime.counting import Counts

DeviceName = Literal["h200"]


@dataclass(frozen=True)
class Rates:
    """What a GPU and its host reach in practice.

    Attributes:
        flops: floating point operations per second of products in bfloat16.
        bytes: bytes that are read and written per second.
        launch: seconds that the host takes for a launch.
    """

    flops: float
    bytes: float
    launch: float

    def seconds(self, counts: "Counts") -> tuple[float, float, float]:
        """Bound times from below: of the host, and of the launches that bytes and that operations bound on the GPU."""
        each = [(size / self.bytes, flops / self.flops) for size, flops in counts.work]
        return (
            counts.launches.total() * self.launch,
            sum(moved for moved, computed in each if moved >= computed),
            sum(computed for moved, computed in each if moved < computed),
        )


RATES: dict[DeviceName, Rates] = {"h200": Rates(400e12, 3.8e12, 25e-6)}
"""The launch is the shortest that was measured, see `benchmarks/pages/gpu.md`."""


@dataclass(frozen=True)
class Roofline:
    """Bound on the rate of featurizing on one GPU, from one batch in bfloat16.

    Attributes:
        device: the GPU.
        batch_size: rows of the batch.
        launches: kernels.
        host: seconds in which the host launches them.
        memory: seconds of the launches on the GPU that their bytes bound.
        arithmetic: seconds of those that their operations bound.
    """

    device: DeviceName
    batch_size: int
    launches: int
    host: float
    memory: float
    arithmetic: float

    @classmethod
    def of(cls, counts: "Counts", batch_size: int, device: DeviceName) -> "Roofline":
        """Bound the time of a batch of some rows from what was counted.

        Raises:
            ValueError: the device is unknown.
        """
        rates = RATES[checked_choice(device, "device", DeviceName)]
        return cls(device, batch_size, counts.launches.total(), *rates.seconds(counts))

    @property
    def gpu(self) -> float:
        """Return the seconds of all launches on the GPU, one after the other."""
        return self.memory + self.arithmetic

    @property
    def rows_per_second(self) -> float:
        """Return the rows per second that cannot be exceeded: host and GPU work at the same time."""
        return self.batch_size / max(self.host, self.gpu)

    @property
    def bound(self) -> Literal["host", "memory", "arithmetic"]:
        """Say what takes longest."""
        if self.host > self.gpu:
            return "host"
        return "memory" if self.memory >= self.arithmetic else "arithmetic"

    def __str__(self) -> str:
        return (
            f"at most {self.rows_per_second:,.0f} rows/s on one {self.device}, bound by its {self.bound}: a batch of "
            f"{self.batch_size:,} takes the GPU {1e3 * self.memory:.1f} ms for memory and "
            f"{1e3 * self.arithmetic:.1f} ms for arithmetic, and the host {1e3 * self.host:.1f} ms for "
            f"{self.launches:,} launches"
        )
