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

from hf_trak import __version__

logger = logging.getLogger(__name__)

README = "README.md"
TAGS = ("trak", "data-attribution", "hf_trak")
Section = Literal["index", "scores"]


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
        metadata cannot be parsed, or the markers in it do not form one section.

    Raises:
        ValueError: the new card lacks the section.
    """
    if existing is None:
        return new
    begin, end = rf"<!-- hf_trak {section}: begin\b[^\n]*-->", rf"<!-- hf_trak {section}: end -->"
    fresh = re.search(f"{begin}.*{end}", new, flags=re.DOTALL)
    if fresh is None:
        raise ValueError(f"The new card has no {section} section. Expected one from `render_card`.")
    try:
        card = DatasetCard(existing, ignore_metadata_errors=True)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        logger.warning("The existing card is left as it is: its metadata cannot be read (%s).", error)
        return None
    old = list(re.finditer(f"{begin}.*?{end}", card.text, flags=re.DOTALL))
    begins, ends = len(re.findall(begin, card.text)), len(re.findall(end, card.text))
    if not (begins == ends == len(old) <= 1):
        logger.warning(
            "The existing card is left as it is: it has %d begins and %d ends of %s.", begins, ends, section
        )
        return None
    newline = "\r\n" if "\r\n" in card.text else "\n"
    text = fresh[0].replace("\n", newline)
    if old:
        card.text = card.text[: old[0].start()] + text + card.text[old[0].end() :]
    else:
        card.text = card.text.rstrip() + newline * 2 + text + newline
    known = card.data.get("tags") or []
    known = [known] if isinstance(known, str) else list(known)
    card.data["tags"] = [*known, *(tag for tag in TAGS if tag not in known)]
    return str(card)


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
