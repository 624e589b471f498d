"""Dataset cards: made from templates where there is none, updated where there is one.

An update touches two things: it adds tags to the metadata, and it replaces the section between the markers
`<!-- hf_trak index: begin … -->` and `<!-- hf_trak index: end -->` (or `scores`). Everything else stays as its authors
wrote it. A card without the section gets it at its end.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import CommitOperationAdd, DatasetCard, DatasetCardData, DatasetInfo, HfApi

from hf_trak.hub.foreign_json import shown, too_large
from hf_trak.hub.foreign_yaml import MAX_CARD_BYTES, check_card
from hf_trak.version import __version__

logger = logging.getLogger(__name__)

README = "README.md"
TAGS = ("trak", "data-attribution", "hf_trak")
Section = Literal["index", "scores"]

_MAX_YAML_BYTES = 1 << 18
"""Largest metadata that are read and written anew, for which a loader of pure Python takes 6 s."""


def render_card(
    section: Section, title: str, usage: str, facts: Mapping[str, Any], metadata: Mapping[str, Any]
) -> str:
    """A whole new card.

    Args:
        section: which template.
        title: heading of the card.
        usage: lines of Python that show how to use what is published.
        facts: values of the template. Text in them is put on one line and cannot end a table cell, a code span or the
            section.
        metadata: keys of the YAML block besides the tags.
    """
    template = files("hf_trak.hub").joinpath(f"{section}_card.md").read_text(encoding="utf-8")
    data = DatasetCardData(tags=list(TAGS), **metadata)
    plain = {name: _plain(value) for name, value in facts.items()}
    card = DatasetCard.from_template(
        data, template_str=template, title=_plain(title), usage=usage, hf_trak_version=__version__, **plain
    )
    return str(card)


def updated_card(existing: str | None, new: str, section: Section) -> str | None:
    """An existing card with the section and the tags of a new one.

    Args:
        existing: the card as it is; `None` if there is none.
        new: from [`render_card`].
        section: which section of it belongs to this push.

    Returns:
        The card to write, or `None` where the existing one cannot be changed safely and has to be left alone: its
        metadata cannot be parsed, it is larger than cards are, or the markers in it do not form one section.

    Raises:
        ValueError: the new card lacks the section.
    """
    if existing is None:
        return new
    fresh = _sections(new, section)
    if len(fresh) != 1:
        raise ValueError(f"The new card has no {section} section. Expected one from `render_card`.")
    try:
        check_card(existing, _MAX_YAML_BYTES)
        card = DatasetCard(existing, ignore_metadata_errors=True)
        tags = _tags(card)
        old = _sections(card.text, section)
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        logger.warning("The existing card is left as it is: %s.", " ".join(str(error).split())[:200])
        return None
    newline = "\r\n" if "\r\n" in card.text else "\n"
    begin, end = fresh[0]
    text = new[begin:end].replace("\n", newline)
    if old:
        begin, end = old[0]
        card.text = card.text[:begin] + text + card.text[end:]
    else:
        card.text = card.text.rstrip() + newline * 2 + text + newline
    card.data["tags"] = [*tags, *(tag for tag in TAGS if tag not in tags)]
    return str(card)


def _tags(card: DatasetCard) -> list[Any]:
    """The tags that a card has. Raises `ValueError` if they are no list."""
    known = card.data.get("tags") or []
    if not isinstance(known, str | list):
        raise ValueError(f"its tags are {shown(known)}, not a list")
    return [known] if isinstance(known, str) else known


def _sections(text: str, section: Section) -> list[tuple[int, int]]:
    """Where the section of a card begins and ends: one place, or none.

    Raises:
        ValueError: its markers do not form one section.
    """
    begins = [match.start() for match in re.finditer(rf"<!-- hf_trak {section}: begin\b[^\n>]{{0,200}}-->", text)]
    ends = [match.end() for match in re.finditer(f"<!-- hf_trak {section}: end -->", text)]
    if not begins and not ends:
        return []
    if len(begins) != 1 or len(ends) != 1 or begins[0] > ends[0]:
        raise ValueError(f"it has {len(begins)} begins and {len(ends)} ends of {section}, not one section")
    return [(begins[0], ends[0])]


def card_operations(
    api: HfApi, repo_id: str, info: DatasetInfo, new: str, section: Section
) -> list[CommitOperationAdd]:
    """What has to be committed so that a repo's card has the section of a new one: one file, or nothing.

    Args:
        api: the client.
        repo_id: the dataset repo.
        info: of the commit on which the update is based.
        new: from [`render_card`].
        section: which section of it belongs to this push.
    """
    existing = None
    if README in {file.rfilename for file in info.siblings or []}:
        path = Path(api.hf_hub_download(repo_id, README, repo_type="dataset", revision=info.sha))
        if (size := path.stat().st_size) > MAX_CARD_BYTES:
            logger.warning("The existing card of %s is left as it is: %s.", repo_id, too_large(size, MAX_CARD_BYTES))
            return []
        try:
            existing = path.read_bytes().decode()
        except UnicodeDecodeError:
            logger.warning("The existing card of %s is left as it is: it is not UTF-8.", repo_id)
            return []
    text = updated_card(existing, new, section)
    return [] if text is None or text == existing else [CommitOperationAdd(README, text.encode())]


def _plain(value: Any) -> Any:
    """Text that can neither break out of a table cell, a code span or the section, nor start HTML."""
    if isinstance(value, str):
        text = re.sub(r"[\x00-\x1f\x7f\u2028\u2029]", " ", value)
        for old, new in (("<", "&lt;"), ("|", "&#124;"), ("`", "'")):
            text = text.replace(old, new)
        return text[:500]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    return value
