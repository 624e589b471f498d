"""A Space beside an index: the viewer, started from the index alone.

The Space holds a program of a few lines, its requirements and a card; no rows, no features and no token. Training rows
are read from the dataset repo that the index names, without a token, so that private rows are never shown.
"""

import json
from collections.abc import Mapping
from typing import Any

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd

from hf_trak.hub.access import access_errors, hub_api
from hf_trak.hub.names import checked_repo
from hf_trak.version import __version__

GRADIO_VERSION = "6.31.0"
"""Version of Gradio that a Space is given."""

_PORT = "7860"  # where Spaces expect a page
_APP = '''"""The viewer of an attribution index: which training rows helped and harmed a target?"""

from hf_trak.cli.main import main

ARGUMENTS = {arguments}

if __name__ == "__main__":
    raise SystemExit(main(ARGUMENTS))
'''
_CARD = """---
{metadata}---

# {title}

Type a target, and see which training rows helped and harmed the model's output on it, by the attribution index
[{index}](https://huggingface.co/datasets/{index}), made with hf_trak.

This Space holds no training rows. It shows those of the dataset that the index names, if that is public, and row
numbers otherwise. What visitors type is not kept.{private}
"""
_PRIVATE = """

The index is private: give this Space a token that may read it and its model, as the secret `HF_TOKEN`. Rows are read
without it."""


def push_space(
    index: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    task: str | None = None,
    **columns: Any,
) -> CommitInfo:
    """Publish the viewer of an index as a Space of the same name.

    The same call again updates the Space. A Space of a private index is private.

    Args:
        index (`str`):
            The dataset repo of the index, which is published already.
        private (`bool`, *optional*):
            Visibility of a Space that is created; by default that of the index.
        token (`str` or `bool`, *optional*):
            As in `huggingface_hub`; needs the right to write. It is written nowhere.
        task (`str`, *optional*):
            Name of the model output function, where it does not follow from the model.
        columns:
            `text_columns`, `image_column`, `label_column` and `max_length`, as rows were prepared with.

    Returns:
        `huggingface_hub.CommitInfo`: the commit.

    Raises:
        ValueError: `index` cannot be the name of a repo, or the Space exists and is public while the index is private.
        HubAccessError: the index does not exist, or the Space cannot be written to.
    """
    checked_repo(index, "`index`")
    api = hub_api(token)
    with access_errors(index, None):
        info = api.dataset_info(index)
        hidden = bool(info.private or private)
        space = api.create_repo(
            info.id, repo_type="space", space_sdk="gradio", private=hidden or None, exist_ok=True
        ).repo_id
        if hidden and not api.space_info(space).private:
            raise ValueError(
                f"The Space {space!r} exists and is public, and is to show the private index {index!r}. Nothing was "
                "uploaded. Expected a private Space: change its visibility in its settings."
            )
        files = space_files(info.id, bool(info.private), task, columns)
        return api.create_commit(
            space,
            [CommitOperationAdd(name, text.encode()) for name, text in files.items()],
            commit_message="Upload the viewer of an attribution index with hf_trak",
            repo_type="space",
        )


def space_files(index: str, private: bool, task: str | None, columns: Mapping[str, Any]) -> dict[str, str]:
    """Write the files of a Space.

    Args:
        index: the dataset repo of the index.
        private: whether it is private.
        task: name of the model output function, if it is to be named.
        columns: columns and length of rows, as in [`push_space`]; those that are `None` are left out.

    Returns:
        Contents by name: `app.py`, `requirements.txt` and `README.md`.
    """
    arguments = ["serve", index, "--host", "0.0.0.0", "--port", _PORT, "--public_rows", "--use_cpu"]
    for name, value in {"task": task, **columns}.items():
        if value is not None:
            arguments += [f"--{name}", *map(str, value if isinstance(value, list | tuple) else [value])]
    title = f"Training rows behind {index.rpartition('/')[2]}"
    metadata = {
        "title": title,
        "sdk": "gradio",
        "sdk_version": GRADIO_VERSION,
        "app_file": "app.py",
        "datasets": [index],
        "tags": ["trak", "data-attribution", "hf_trak"],
    }
    card = _CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        title=title,
        index=index,
        private=_PRIVATE if private else "",
    )
    return {
        "app.py": _APP.format(arguments=json.dumps(arguments, indent=4)),
        "requirements.txt": f"hf_trak[viewer]=={__version__}\n",
        "README.md": card,
    }
