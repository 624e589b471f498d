"""Sounds that are drawn here: tones that rise, fall, stay or waver, in noise; and their spectrograms."""

import numpy as np
from datasets import Audio, Dataset
from scipy.signal import chirp, spectrogram

from hf_trak.report.sounds import as_wav

RATE, SECONDS = 4000, 0.5
KINDS = ("rising", "falling", "steady", "wavering")
TAKEN_FOR = {"rising": "falling"}
"""The kind whose clips are mislabelled, and what they are said to be."""
BANDS, FRAMES = 32, 32


def clip(kind: str, numbers: np.random.Generator) -> np.ndarray:
    """Draw the sound of one clip, `(RATE · SECONDS,)`.

    Args:
        kind: one of `KINDS`.
        numbers: draws pitch, loudness and noise.
    """
    times = np.arange(int(RATE * SECONDS)) / RATE
    low = numbers.uniform(250, 450)
    high = low * numbers.uniform(1.6, 2.2)
    if kind == "steady":
        sound = np.sin(2 * np.pi * numbers.uniform(low, high) * times)
    elif kind == "wavering":
        middle, depth, speed = (low + high) / 2, (high - low) / 2, numbers.uniform(6, 10)
        sound = np.sin(2 * np.pi * middle * times - depth / speed * np.cos(2 * np.pi * speed * times))
    else:
        start, end = (low, high) if kind == "rising" else (high, low)
        sound = chirp(times, start, SECONDS, end, phi=numbers.uniform(0, 360))
    return numbers.uniform(0.5, 1.0) * sound + 0.2 * numbers.standard_normal(len(times))


def features(sound: np.ndarray) -> np.ndarray:
    """Compute the log-spectrogram of a sound, standardized, `(FRAMES, BANDS)`."""
    length = len(sound) // FRAMES
    power = spectrogram(sound, RATE, nperseg=2 * length, noverlap=length, nfft=2 * length)[2][:BANDS]
    padded = np.pad(power, ((0, 0), (0, FRAMES - power.shape[1])), mode="edge")
    level = np.log(padded.T + 1e-6)
    return ((level - level.mean()) / level.std()).astype(np.float32)


def draw(count: int, mislabelled_share: float, seed: int) -> Dataset:
    """Draw clips of all kinds in turn, some of them with a wrong label.

    Args:
        count: number of clips.
        mislabelled_share: share of wrong labels among the clips of the kind that is mislabelled.
        seed: seed of everything.
    """
    numbers = np.random.default_rng(seed)
    kinds = [KINDS[place % len(KINDS)] for place in range(count)]
    sounds = [clip(kind, numbers) for kind in kinds]
    wrong = [kind in TAKEN_FOR and numbers.random() < mislabelled_share for kind in kinds]
    said = [TAKEN_FOR[kind] if mark else kind for kind, mark in zip(kinds, wrong, strict=True)]
    rows = Dataset.from_dict(
        {
            "input_values": [features(sound) for sound in sounds],
            "labels": [KINDS.index(kind) for kind in said],
            "kind": kinds,
            "mislabelled": wrong,
            "sound": [{"bytes": as_wav(sound, RATE), "path": None} for sound in sounds],  # for the report
        }
    )
    return rows.cast_column("sound", Audio(RATE, decode=False))
