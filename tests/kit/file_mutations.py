"""Mutations of a directory drawn at random, on top of the single kinds of damage in `damage.py`."""

import json
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from damage import Damage, files_below, flip, replaced, swapped


def header_length(data: bytes) -> int:
    """Bytes of a file before its tensors: all of it unless it is a safetensors file."""
    if len(data) > 9 and data[8:9] == b"{":
        return min(8 + struct.unpack("<Q", data[:8])[0], len(data))
    return len(data)


def mutations(directory: Path, seed: int, foreign: Path | None = None) -> Iterator[Damage]:
    """Draw mutations without end.

    Args:
        directory: an intact one.
        seed: of the draws.
        foreign: a directory of the same layout from another run, whose files take the place of these.
    """
    rng = random.Random(seed)
    files = files_below(directory)
    kinds = [_flip, _flip, _flip, _cut, _blank, _append, _remove, _swap, _rename, _swap_directories, _edit, _edit]
    while True:
        file = rng.choice(files)
        if foreign is not None and rng.random() < 0.08:
            drawn = _transplant(rng, directory, file, foreign)
        else:
            drawn = rng.choice(kinds)(rng, directory, file)
        if drawn is not None:
            yield drawn


def every_header_flip(directory: Path) -> Iterator[Damage]:
    """One flipped bit in every byte of every header."""
    for file in files_below(directory):
        data = (directory / file).read_bytes()
        for place in range(header_length(data)):
            yield flip(file, place, (place * 5 + len(data)) % 8)


def _flip(rng: random.Random, directory: Path, file: Path) -> Damage:
    data = (directory / file).read_bytes()
    # headers are short beside tensors, and say more
    limit = header_length(data) if rng.random() < 0.5 else len(data)
    return flip(file, rng.randrange(limit), rng.randrange(8))


def _cut(rng: random.Random, directory: Path, file: Path) -> Damage:
    left = rng.randrange((directory / file).stat().st_size)
    return replaced(file, lambda data: data[:left], f"cut {file} to {left} bytes")


def _blank(rng: random.Random, directory: Path, file: Path) -> Damage:
    size = (directory / file).stat().st_size
    start = rng.randrange(size)
    stop = min(size, start + rng.choice((1, 8, 64, 512)))
    return replaced(
        file, lambda data: data[:start] + bytes(stop - start) + data[stop:], f"zero bytes {start} to {stop} of {file}"
    )


def _append(rng: random.Random, directory: Path, file: Path) -> Damage:
    extra = rng.randbytes(rng.choice((1, 4, 64)))
    return replaced(file, lambda data: data + extra, f"append {len(extra)} bytes to {file}")


def _remove(rng: random.Random, directory: Path, file: Path) -> Damage:
    return Damage(f"delete {file}", (file,), lambda copy: (copy / file).unlink())


def _swap(rng: random.Random, directory: Path, file: Path) -> Damage | None:
    others = [one for one in files_below(directory) if one.suffix == file.suffix and one != file]
    return swapped(file, rng.choice(others)) if others else None


def _folder(rng: random.Random, file: Path) -> Path | None:
    return Path(*file.parts[: rng.randrange(1, len(file.parts))]) if len(file.parts) > 1 else None


def _rename(rng: random.Random, directory: Path, file: Path) -> Damage | None:
    old = _folder(rng, file)
    if old is None:
        return None
    new = old.with_name(rng.choice((f"{old.name}-copy", old.name[:-1] + "7", f"old-{old.name}")))
    if (directory / new).exists():
        return None
    return Damage(f"rename {old} to {new}", (old, new), lambda copy: (copy / old).rename(copy / new))


def _swap_directories(rng: random.Random, directory: Path, file: Path) -> Damage | None:
    old = _folder(rng, file)
    if old is None:
        return None
    others = [path for path in (directory / old).parent.iterdir() if path.is_dir() and path.name != old.name]
    return swapped(old, rng.choice(sorted(others)).relative_to(directory)) if others else None


def _transplant(rng: random.Random, directory: Path, file: Path, foreign: Path) -> Damage | None:
    part = Path(*file.parts[: rng.randrange(1, len(file.parts) + 1)])
    if not (foreign / part).exists():
        return None

    def act(copy: Path) -> None:
        if (copy / part).is_dir():
            shutil.rmtree(copy / part)
            shutil.copytree(foreign / part, copy / part)
        else:
            shutil.copyfile(foreign / part, copy / part)

    return Damage(f"{part} of another run", (part,), act)


def _edit(rng: random.Random, directory: Path, file: Path) -> Damage | None:
    """A value of a JSON file, or of the JSON in a header, set to another of its type, as a hand would do it."""
    data = (directory / file).read_bytes()
    if file.suffix == ".json":
        edited = _edited(rng, json.loads(data))
        changed = None if edited is None else json.dumps(edited[1], indent=2).encode()
    else:
        edited, changed = _edited_header(rng, data)
    if edited is None or changed is None:
        return None
    return replaced(file, lambda _: changed, f"set {edited[0]} in {file}")


def _edited_header(rng: random.Random, data: bytes) -> tuple[tuple[str, Any] | None, bytes | None]:
    length = header_length(data)
    if length == len(data):
        return None, None
    header = json.loads(data[8:length])
    text = header.get("__metadata__", {}).get("hf_trak")
    edited = None if text is None else _edited(rng, json.loads(text))
    if edited is None:
        return None, None
    header["__metadata__"]["hf_trak"] = json.dumps(edited[1], sort_keys=True)
    body = json.dumps(header).encode()
    body += b" " * (-len(body) % 8)
    return edited, struct.pack("<Q", len(body)) + body + data[length:]


def _edited(rng: random.Random, content: Any) -> tuple[str, Any] | None:
    """`(what was changed, the changed content)`."""
    leaves = list(_leaves(content))
    if not leaves:
        return None
    path = rng.choice(leaves)
    copy = json.loads(json.dumps(content))
    place = copy
    for key in path[:-1]:
        place = place[key]
    old = place[path[-1]]
    place[path[-1]] = new = _another(rng, old)
    return f"{'.'.join(map(str, path))} from {old!r} to {new!r}", copy


def _leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(content, dict | list) and content:
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _leaves(value, (*path, key))
    elif path:
        yield path


def _another(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, 2 * value + 1, -value - 1, value * 10**6 + 7))
    if isinstance(value, float):
        return rng.choice((value * 1.5 + 1, -value - 1, value + 1000.0))
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1") if value else "x"
    return 1
