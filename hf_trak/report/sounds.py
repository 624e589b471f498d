"""Sounds of rows as files that a browser plays, within bounds, since a row may hold an hour of sound, or none."""

import base64
import io
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hf_trak.report.content import is_samples, is_tensor, visible

MOST_BYTES = 4 << 20

"""Size of the largest sound that is shown: two minutes of one channel at 16 kHz."""


MOST_CHARACTERS_OF_PAGE = 64 << 20

"""Size of all sounds of a page, where each counts as often as its row occurs."""


_STARTS = {b"RIFF": "wav", b"fLaC": "flac", b"OggS": "ogg", b"ID3": "mpeg"}

_MP3_FRAMES = (b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")


class UnreadableSoundError(ValueError):
    """A sound cannot be shown. The message is the reason, in a few words."""


def as_uri(sound: Any) -> str:
    """Write a sound as a `data:` URL.

    Args:
        sound: a mapping as `datasets.Audio` stores it, with the file itself as `bytes` or its `path` on this machine,
            or with numbers as `array`, `(n,)`, `(channels, n)` or `(n, channels)`, and `sampling_rate`.

    Raises:
        UnreadableSoundError: the sound is of an unknown kind, too long, or not at hand.
    """
    try:
        data = as_wav(sound["array"], sound["sampling_rate"]) if is_samples(sound) else _file(sound)
    except UnreadableSoundError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:  # nested lists of different lengths, a rate in words
        raise UnreadableSoundError("its samples or its sampling rate are no numbers") from error
    kind = next((kind for start, kind in _STARTS.items() if data.startswith(start)), None)
    kind = kind or ("mpeg" if data.startswith(_MP3_FRAMES) else None)
    if kind is None:
        raise UnreadableSoundError("it is no file of the formats WAV, FLAC, Ogg and MP3")
    return f"data:audio/{kind};base64,{base64.b64encode(data).decode()}"


def as_wav(samples: Any, rate: int) -> bytes:
    """Write samples as a WAV file of 16 bits.

    Args:
        samples: integers of 16 bits, or numbers in [-1, 1], `(n,)`, `(channels, n)` or `(n, channels)` with up to two
            channels. Louder ones are made quieter.
        rate: samples per second.

    Raises:
        UnreadableSoundError: the samples have another shape or are too many, or the rate is no rate.
    """
    array = np.asarray(samples.detach().cpu() if is_tensor(samples) else samples)
    if array.ndim == 2 and array.shape[0] in (1, 2):
        array = array.T
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] not in (1, 2)) or array.dtype.kind not in "fiu":
        raise UnreadableSoundError(f"its samples have the shape {array.shape} and the dtype {array.dtype}")
    if 2 * array.size > MOST_BYTES:
        raise UnreadableSoundError(_too_long(2 * array.size))
    if not 0 < int(rate) < 1 << 31:
        raise UnreadableSoundError(f"its sampling rate is {rate}")
    if array.dtype != np.int16:
        numbers = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        array = np.round(32767 * numbers / max(1.0, np.abs(numbers).max(initial=0.0))).astype(np.int16)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1 if array.ndim == 1 else array.shape[1])
        file.setsampwidth(2)
        file.setframerate(int(rate))
        file.writeframes(array.astype("<i2").tobytes())
    return buffer.getvalue()


def _file(sound: Any) -> bytes:
    """Return the bytes of a sound that is kept as a file."""
    data, path = (sound.get("bytes"), sound.get("path")) if isinstance(sound, Mapping) else (sound, None)
    if data is None and isinstance(path, str):
        file, name = Path(path), visible(path)[-80:]
        if not file.is_file():  # a pipe would block
            raise UnreadableSoundError(f"its file {name} does not exist on this machine")
        try:
            size = file.stat().st_size
            data = file.read_bytes() if size <= MOST_BYTES else b""
        except OSError as error:
            raise UnreadableSoundError(f"its file {name} cannot be read") from error
    elif isinstance(data, bytes):
        size = len(data)
    else:
        raise UnreadableSoundError("the row has neither its content nor its path")
    if size > MOST_BYTES:
        raise UnreadableSoundError(_too_long(size))
    return data


def _too_long(size: int) -> str:
    return f"it has {size / 1e6:.1f} MB; up to {MOST_BYTES / 1e6:.1f} MB are shown"
