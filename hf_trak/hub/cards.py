"""Dataset cards: written from templates for new repos, and updated in repos that have one.

An update changes two things: it adds tags to the metadata, and it replaces the section between the markers
`<!-- hf_trak index: begin … -->` and `<!-- hf_trak index: end -->` (or `scores`). Everything else stays as its authors
wrote it. If the card lacks the section, it is appended.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import CommitOperationAdd, DatasetCard, DatasetCardData, DatasetInfo, HfApi

from hf_trak.hub.names import MAX_CARD_BYTES, check_card, shown, too_large
from hf_trak.version import __version__

logger = logging.getLogger(__name__)

README = "README.md"
TAGS = ("trak", "data-attribution", "hf_trak")
Section = Literal["index", "scores", "bank"]

_MAX_YAML_BYTES = 1 << 18
"""Maximum size of the metadata of a card that is updated; a YAML loader in pure Python takes 6 s for it."""


def render_card(
    section: Section, title: str, usage: str, facts: Mapping[str, Any], metadata: Mapping[str, Any]
) -> str:
    """Write a whole new card.

    Args:
        section: name of the template.
        title: heading of the card.
        usage: lines of Python that show how to use the published files.
        facts: values of the template. Text in them is put on one line and cannot end a table cell, a code span or the
            section.
        metadata: keys of the YAML block besides the tags.
    """
    template = files("hf_trak.hub").joinpath(f"{section}_card.md").read_text(encoding="utf-8")
    data = DatasetCardData(tags=list(TAGS), **metadata)
    escaped = {name: _escaped(value) for name, value in facts.items()}
    card = DatasetCard.from_template(
        data, template_str=template, title=_escaped(title), usage=usage, hf_trak_version=__version__, **escaped
    )
    return str(card)


def updated_card(existing: str | None, new: str, section: Section) -> str | None:
    """Put the section and the tags of a new card into an existing one.

    Args:
        existing: the card in the repo; `None` if there is none.
        new: a card from [`render_card`].
        section: the section to replace or append.

    Returns:
        The card to write, or `None` if the existing one cannot be changed safely: its metadata cannot be parsed, it
        is too large, or the markers in it do not form one section.

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
        logger.warning("The existing card is not changed: %s.", " ".join(str(error).split())[:200])
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
    """Return the tags of a card. Raises `ValueError` if they are not a list."""
    known = card.data.get("tags") or []
    if not isinstance(known, str | list):
        raise ValueError(f"its tags are {shown(known)}, not a list")
    return [known] if isinstance(known, str) else known


def _sections(text: str, section: Section) -> list[tuple[int, int]]:
    """Find the section of a card: a list with its first and last position, or an empty list.

    Raises:
        ValueError: the markers do not form one section.
    """
    begins = [match.start() for match in re.finditer(rf"<!-- hf_trak {section}: begin\b[^\n>]{{0,200}}-->", text)]
    ends = [match.end() for match in re.finditer(f"<!-- hf_trak {section}: end -->", text)]
    if not begins and not ends:
        return []
    if len(begins) != 1 or len(ends) != 1 or begins[0] > ends[0]:
        raise ValueError(
            f"it has {len(begins)} begin markers and {len(ends)} end markers of {section}, not one section"
        )
    return [(begins[0], ends[0])]


def card_operations(
    api: HfApi, repo_id: str, info: DatasetInfo, new: str, section: Section
) -> list[CommitOperationAdd]:
    """Return the change that puts the section of a new card into a repo's card: one file, or nothing.

    Args:
        api: the client.
        repo_id: the dataset repo.
        info: the commit that the update is based on.
        new: a card from [`render_card`].
        section: the section to replace or append.
    """
    existing = None
    if README in {file.rfilename for file in info.siblings or []}:
        path = Path(api.hf_hub_download(repo_id, README, repo_type="dataset", revision=info.sha))
        if (size := path.stat().st_size) > MAX_CARD_BYTES:
            logger.warning("The existing card of %s is not changed: %s.", repo_id, too_large(size, MAX_CARD_BYTES))
            return []
        try:
            existing = path.read_bytes().decode()
        except UnicodeDecodeError:
            logger.warning("The existing card of %s is not changed: it is not UTF-8.", repo_id)
            return []
    text = updated_card(existing, new, section)
    return [] if text is None or text == existing else [CommitOperationAdd(README, text.encode())]


def _escaped(value: Any) -> Any:
    """Escape text so that it can neither end a table cell, a code span or the section, nor start HTML."""
    if isinstance(value, str):
        text = re.sub(r"[\x00-\x1f\x7f\u2028\u2029]", " ", value)
        for old, new in (("<", "&lt;"), ("|", "&#124;"), ("`", "'")):
            text = text.replace(old, new)
        return text[:500]
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [_escaped(item) for item in value]
    return value
