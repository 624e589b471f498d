"""Sounds in reports: files and samples become what a browser plays, and what it cannot play is refused in words."""

import base64
import html
import io
import os
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Audio, Dataset

from hf_trak.report import AttributionRun, ReportOptions, write_report
from hf_trak.report import sounds as module
from hf_trak.report.content import Columns, content_of, stored
from hf_trak.report.sounds import MOST_BYTES, UnreadableSoundError, as_uri, as_wav
from hf_trak.report.views import RunViews

RATE = 8000


def samples_of(data: bytes) -> tuple[np.ndarray, int]:
    """Read a WAV file: its samples, `(n, channels)`, and its rate."""
    with wave.open(io.BytesIO(data)) as file:
        assert file.getsampwidth() == 2
        read = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        return read.reshape(-1, file.getnchannels()), file.getframerate()


def tone(number: int) -> np.ndarray:
    return (10_000 * np.sin(np.arange(40) * (number + 1) / 7)).astype(np.int16)


def files(count: int) -> list[bytes]:
    return [as_wav(tone(number), RATE) for number in range(count)]


def run_of(column: list[Any], count: int = 2) -> AttributionRun:
    """Make a run whose first rows are targets; row i helped target j by i − j, and harmed it if that is negative."""
    train = Dataset.from_dict({"audio": column}).cast_column("audio", Audio(decode=False))
    scored = train.select(range(count))
    places = np.arange(len(column))
    ends = {
        "trak_indices": places[::-1], "trak_scores": places[::-1] - 0.5,
        "trak_harmful_indices": places, "trak_harmful_scores": places - 0.5,
    }  # fmt: skip
    for name, values in ends.items():
        scored = scored.add_column(name, [values.tolist()] * count)
    return AttributionRun(scored, train)


def test_samples_are_written_to_the_bit() -> None:
    read, rate = samples_of(as_wav(tone(0), RATE))
    assert rate == RATE and (read[:, 0] == tone(0)).all()
    both = np.stack([tone(0), tone(1)])
    for given in (both, both.T, torch.from_numpy(both), both.tolist()):
        read, _ = samples_of(as_wav(np.asarray(given, dtype=np.int16), RATE))
        assert (read == both.T).all()


@pytest.mark.parametrize("factor", [0.25, 1.0, 40.0])
def test_loud_samples_are_made_quieter_and_others_left_alone(factor: float) -> None:
    sound = torch.sin(torch.arange(100) / 5.0) * factor
    read, _ = samples_of(as_wav(sound, RATE))
    expected = sound.double().numpy() / max(1.0, float(sound.abs().max()))
    assert np.abs(read[:, 0] / 32767 - expected).max() <= 0.5 / 32767 + 1e-9


def test_numbers_that_are_none_are_silent() -> None:
    read, _ = samples_of(as_wav([0.5, float("nan"), float("inf"), -0.5], RATE))
    assert read[:, 0].tolist() == [16384, 0, 0, -16384]


@pytest.mark.parametrize(
    ("start", "kind"),
    [(b"RIFF", "wav"), (b"fLaC", "flac"), (b"OggS", "ogg"), (b"ID3", "mpeg"), (b"\xff\xfb", "mpeg")],
)
def test_files_stay_as_they_are(start: bytes, kind: str, tmp_path: Path) -> None:
    content = start + bytes(range(50))
    (tmp_path / "a").write_bytes(content)
    for sound in ({"bytes": content, "path": "x.wav"}, {"bytes": None, "path": str(tmp_path / "a")}):
        head, _, coded = as_uri(sound).partition(",")
        assert head == f"data:audio/{kind};base64" and base64.b64decode(coded) == content


def refused(tmp_path: Path) -> dict[str, Any]:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b"RIFF" + bytes(MOST_BYTES))
    return {
        "formats WAV": {"bytes": b"<svg onload=alert(1)>", "path": None},
        "has 4.2 MB; up to 4.2 MB": {"bytes": b"RIFF" + bytes(MOST_BYTES), "path": None},
        "up to 4.2 MB are shown": {"bytes": None, "path": str(tmp_path / "long")},
        "pipe does not exist": {"bytes": None, "path": str(tmp_path / "pipe")},
        "absent.wav does not exist on this machine": {"bytes": None, "path": str(tmp_path / "absent.wav")},
        r"file a\\x00b does not exist": {"bytes": None, "path": "a\0b"},
        "neither its content nor its path": {"bytes": None, "path": None},
        "neither its content": "hello",
        r"shape \(2, 3, 4\)": {"array": np.zeros((2, 3, 4)), "sampling_rate": RATE},
        r"dtype <U2": {"array": ["hi"], "sampling_rate": RATE},
        "has 8.4 MB": {"array": np.zeros(MOST_BYTES), "sampling_rate": RATE},
        "sampling rate is 0": {"array": [0.0], "sampling_rate": 0},
        "are no numbers": {"array": [[0.0], [1.0, 2.0]], "sampling_rate": RATE},
        "sampling rate are no numbers": {"array": [0.0], "sampling_rate": "fast"},
        "or its sampling rate are": {"array": [0.0], "sampling_rate": float("inf")},
    }


def test_what_cannot_be_played_is_refused_in_words(tmp_path: Path) -> None:
    for words, sound in refused(tmp_path).items():
        with pytest.raises(UnreadableSoundError, match=words):
            as_uri(sound)


def test_a_report_plays_the_sounds_of_targets_and_rows(tmp_path: Path) -> None:
    written = files(4)
    run = run_of([{"bytes": data, "path": None} for data in written])
    page = write_report(run, tmp_path / "report.html", ReportOptions(examples=2)).read_text(encoding="utf-8")
    played = [base64.b64decode(coded) for coded in re.findall(r'<audio [^>]*src="data:audio/wav;base64,(.*?)"', page)]
    of_rows = [written[3], written[2], written[0]]  # row 0 alone has a negative score
    assert played == [written[0], *of_rows, written[1], *of_rows]
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="(.*?)"', page)[0])
    assert "media-src data:" in policy and "default-src 'none'" in policy


def test_sounds_that_cannot_be_shown_are_named_with_the_reason(tmp_path: Path) -> None:
    run = run_of([{"bytes": b"<b>", "path": None}, {"bytes": files(1)[0], "path": None}], count=1)
    page = write_report(run, tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<audio ") == 1
    assert page.count("Not shown: the sound: it is no file of the formats") == 2  # the target, and row 0


def test_the_page_has_room_for_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of([{"bytes": data, "path": None} for data in files(6)])
    size = len(as_uri({"bytes": files(1)[0]}))
    monkeypatch.setattr("hf_trak.report.views.MOST_CHARACTERS_OF_PAGE", 4 * size)
    views = RunViews(run, examples=3)
    shown = [views.target(0), views.target(1)]
    rows = [row for view in shown for row in (view.target, *(one.example for one in (*view.helped, *view.harmed)))]
    assert len(rows) == 10 and [row.sound is not None for row in rows] == [True] * 4 + [False] * 6
    assert all((row.unshown or "").startswith("the sound: the page has") for row in rows[4:])
    assert module.MOST_CHARACTERS_OF_PAGE > 4 * MOST_BYTES


def test_sounds_are_found_by_type_and_by_their_numbers() -> None:
    sound = {"array": [0.0, 0.5], "sampling_rate": RATE}
    plain = [{"speech": sound, "text": "hello"}]
    table = Dataset.from_list(plain)
    for rows in (plain, table, stored(table)):
        found = Columns.find(rows)
        assert (found.sound, found.texts) == ("speech", ("text",))
        read, rate = samples_of(base64.b64decode(as_uri(content_of(rows[0], found).sound).partition(",")[2]))
        assert (read[:, 0].tolist(), rate) == ([0, 16384], RATE)
    assert Columns.find([{"text": "hello"}]).sound is None
