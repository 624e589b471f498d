"""A Space beside an index: the viewer, started from the index alone.

The Space holds a program of a few lines, hf_trak as a wheel, its requirements and a card; no rows, no features and no
token. Training rows are read from the dataset repo that the index names, without a token, so that private rows are
never shown.
"""

import json
import os
import zipfile
from email.parser import BytesParser
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete
from packaging.requirements import Requirement

from hf_trak.hub.access import access_errors, hub_api
from hf_trak.hub.names import checked_repo

GRADIO_VERSION = "6.31.0"
"""Version of Gradio that a Space is given."""

_PORT = "7860"  # where Spaces expect a page
_APP = '''"""The viewer of an attribution index: which training rows helped and harmed a target?"""

import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ARGUMENTS = {arguments}

if __name__ == "__main__":
    with zipfile.ZipFile(HERE / {wheel}) as wheel:  # no registry has the package
        wheel.extractall(HERE / "package")
    sys.path.insert(0, str(HERE / "package"))
    from hf_trak.cli.main import main

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
    wheel: str | os.PathLike[str],
    *,
    private: bool = True,
    token: str | bool | None = None,
    task: str | None = None,
    **columns: Any,
) -> CommitInfo:
    """Publish the viewer of an index as a Space of the same name.

    The same call again updates the Space. A Space of a private index is private.

    Args:
        index (`str`):
            The dataset repo of the index, which is published already.
        wheel (`str` or `PathLike`):
            The wheel of hf_trak that the Space runs, as `python -m build --wheel` makes it.
        private (`bool`, *optional*, defaults to `True`):
            Create a private Space, and refuse a public one. `False` creates a public Space of a public index.
        token (`str` or `bool`, *optional*):
            As in `huggingface_hub`; needs the right to write. It is written nowhere.
        task (`str`, *optional*):
            Name of the model output function, where it does not follow from the model.
        columns:
            `text_columns`, `image_column`, `label_column` and `max_length`, as rows were prepared with.

    Returns:
        `huggingface_hub.CommitInfo`: the commit.

    Raises:
        ValueError: `index` cannot be the name of a repo, `wheel` is no wheel of hf_trak, or the Space exists and is
            public while it is to be private.
        HubAccessError: the index does not exist, or the Space cannot be written to.
    """
    checked_repo(index, "`index`")
    path = Path(wheel)
    needed = _requirements(path)
    api = hub_api(token)
    with access_errors(index, None):
        info = api.dataset_info(index)
        hidden = bool(info.private or private)
        space = api.create_repo(info.id, repo_type="space", space_sdk="gradio", private=hidden, exist_ok=True).repo_id
        known = api.space_info(space)
        if hidden and not known.private:
            raise ValueError(
                f"The Space {space!r} exists and is public, and is to show {index!r} in private. Nothing was "
                "uploaded. Make it private in its settings; that of a public index may be public with `private=False`."
            )
        arguments = ["serve", info.id, "--host", "0.0.0.0", "--port", _PORT, "--public_rows", "--use_cpu"]
        for name, value in {"task": task, **columns}.items():
            if value is not None:
                arguments += [f"--{name}", *map(str, value if isinstance(value, list | tuple) else [value])]
        title = f"Training rows behind {info.id.rpartition('/')[2]}"
        metadata = {
            "title": title, "sdk": "gradio", "sdk_version": GRADIO_VERSION, "app_file": "app.py",
            "datasets": [info.id], "tags": ["trak", "data-attribution", "hf_trak"],
        }  # fmt: skip
        yaml_block, token_note = yaml.safe_dump(metadata, sort_keys=False), _PRIVATE if info.private else ""
        files = {
            "app.py": _APP.format(arguments=json.dumps(arguments, indent=4), wheel=json.dumps(path.name)),
            "requirements.txt": "".join(f"{one}\n" for one in needed),
            "README.md": _CARD.format(metadata=yaml_block, title=title, index=info.id, private=token_note),
        }
        others = [file.rfilename for file in known.siblings or [] if file.rfilename.endswith(".whl")]
        return api.create_commit(
            space,
            [
                *(CommitOperationAdd(name, text.encode()) for name, text in files.items()),
                CommitOperationAdd(path.name, str(path)),
                *(CommitOperationDelete(name) for name in others if name != path.name),
            ],
            commit_message="Upload the viewer of an attribution index with hf_trak",
            repo_type="space",
        )


def _requirements(wheel: Path) -> list[str]:
    """Return what a wheel of hf_trak needs beside itself and Python, the viewer included."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            facts = BytesParser().parsebytes(archive.read(name))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"`wheel` is {str(wheel)!r}, no wheel that can be read ({error}). Expected that of hf_trak. Make it "
            "with `python -m build --wheel` in its repository."
        ) from error
    if facts["Name"] != "hf_trak":
        raise ValueError(f"`wheel` is that of {facts['Name']!r}. Expected that of hf_trak.")
    needed = [Requirement(text) for text in facts.get_all("Requires-Dist") or []]
    chosen = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": "viewer"})]
    return [f"{one.name}{one.specifier}" for one in chosen]
