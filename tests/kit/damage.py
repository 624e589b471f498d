"""Ways to damage the files of a directory, for tests that nothing damaged gives wrong numbers in silence."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Act = Callable[[Path], object]


@dataclass(frozen=True)
class Damage:
    """One kind of damage.

    Attributes:
        name: for messages.
        files: what it touches, relative to the directory.
        act: does it to a directory.
        foreign: whether the files are intact ones of another directory.
    """

    name: str
    files: tuple[Path, ...]
    act: Act
    foreign: bool = False

    def __str__(self) -> str:
        return self.name


def files_below(directory: Path) -> list[Path]:
    """Files with content, relative to the directory."""
    found = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.stat().st_size]
    return [path.relative_to(directory) for path in found]


def flips(directory: Path, count: int, seed: int = 0) -> Iterator[Damage]:
    """Single bits, `count` of them in all, as many in every file."""
    rng, files = np.random.default_rng(seed), files_below(directory)
    for number in range(count):
        file = files[number % len(files)]
        byte, bit = int(rng.integers((directory / file).stat().st_size)), int(rng.integers(8))
        yield flip(file, byte, bit)


def flip(file: Path, byte: int, bit: int) -> Damage:
    def act(directory: Path) -> None:
        data = bytearray((directory / file).read_bytes())
        data[byte] ^= 1 << bit
        (directory / file).write_bytes(data)

    return Damage(f"flip bit {bit} of byte {byte} of {file}", (file,), act)


def cuts(directory: Path, seed: int = 0) -> Iterator[Damage]:
    """Every file empty, cut at a random place, cut by its last two bytes (the last one of a JSON file ends the line),
    of zeros, and with bytes behind it."""
    rng = np.random.default_rng(seed)
    for file in files_below(directory):
        size = (directory / file).stat().st_size
        for keep in (0, int(rng.integers(1, size)), size - 2):
            yield replaced(file, lambda data, keep=keep: data[:keep], f"cut {file} to {keep} bytes")
        yield replaced(file, lambda data: data + b"\0garbage", f"append to {file}")
        yield replaced(file, lambda data: b"\0" * len(data), f"zero {file}")


def deletions(directory: Path) -> Iterator[Damage]:
    for file in files_below(directory):
        yield Damage(f"delete {file}", (file,), lambda d, file=file: (d / file).unlink())


def swaps(directory: Path, same_size: bool = True) -> Iterator[Damage]:
    """Every pair of files of different content, exchanged."""
    files = files_below(directory)
    for i, one in enumerate(files):
        for other in files[i + 1 :]:
            a, b = (directory / one).read_bytes(), (directory / other).read_bytes()
            if a != b and (len(a) == len(b) or not same_size):
                yield swapped(one, other)


def swapped(one: Path, other: Path) -> Damage:
    """Two files or directories, exchanged."""

    def act(directory: Path) -> None:
        (directory / one).rename(directory / "exchanged")
        (directory / other).rename(directory / one)
        (directory / "exchanged").rename(directory / other)

    return Damage(f"swap {one} and {other}", (one, other), act)


def taken_from(other: Path, directory: Path, label: str) -> Iterator[Damage]:
    """Every file in turn replaced by that of another directory, where the two differ."""
    for file in files_below(directory):
        if (other / file).is_file() and (other / file).read_bytes() != (directory / file).read_bytes():
            copy = lambda d, file=file: shutil.copyfile(other / file, d / file)  # noqa: E731
            yield Damage(f"{file} of {label}", (file,), copy, foreign=True)


def replaced(file: Path, change: Callable[[bytes], bytes], name: str) -> Damage:
    return Damage(name, (file,), lambda d: (d / file).write_bytes(change((d / file).read_bytes())))
