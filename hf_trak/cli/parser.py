"""The parser of recipes and commands, which fills dataclasses from a YAML file and the command line.

It is `transformers.HfArgumentParser` with an additional `--config file.yaml` (the idea of TRL's parser): the file sets
defaults, and the command line overrides them. Unlike `HfArgumentParser.parse_yaml_file`, it converts and checks values
of the file like the same text on the command line, and refuses keys that are no arguments.
"""

import dataclasses
import difflib
import inspect
import json
import math
import os
import re
from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_type_hints

import yaml

from hf_trak._lazy import module_alone
from hf_trak.hub.names import check_yaml

if TYPE_CHECKING:
    from transformers import HfArgumentParser
else:
    HfArgumentParser = module_alone("transformers", "hf_argparser").HfArgumentParser

MAX_YAML_BYTES = 1 << 18
"""Largest file of arguments, in bytes; one that sets all arguments of a command has 3 kB."""


_CONFIG = "config"

_UNSET = object()

_NULL = "tag:yaml.org,2002:null"

_DOCUMENTED = re.compile(r"^ {4}(\w+) \(`.*\):\n((?: {8}.*\n?)+)", re.M)
"""Names of fields with their texts, in the docstring of a dataclass."""

_SETTINGS = ("output_dir", "proj_dim", "feature_dtype", "curvature", "per_device_batch_size", "use_cpu")
"""Fields of `TrakConfig` that `--help` prints."""

_RARE = (
    "model_revision", "dataset_config_name", "train_split", "max_train_samples", "max_length", "text_columns",
    "image_column", "label_column", "eval_dataset_config_name", "eval_split", "max_eval_samples", "first_pass_bytes",
    "candidates", "max_new_tokens", "distributions", "self_influence", "save_train_dataset", "draws", "count", "part",
    "num_processes", "replay_form", "replay_rows", "replay_steps", "replay_hessian_share", "replay_smoothing",
    "replay_name", "replay_start", "training_args", "rerank_rows", "refine", "all_scores", "scored_by",
    "device", "nodes", "price_per_hour", "factory", "read_bandwidth", "rows_per_second",
)  # fmt: skip
"""Other arguments that `--help all` alone prints."""

_PERCENT = re.compile(r"%%|%\(\w+\)[a-z]|%")


def parse_yaml_and_args(
    dataclass_types: type | Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    description: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:
    """Fill dataclasses from the command line, from the YAML file that it names with `--config`, and from defaults.

    If several dataclasses have a field of the same name, it is one argument for all of them; where it is not given,
    each keeps its own default. YAML files are flat: one key per field, `null` for `None`, lists for list fields. A
    field that is a dataclass itself becomes one argument for each of its fields: the first has the name of the outer
    field (`curvature`), and the others have it as a prefix (`curvature_rows`).

    Args:
        dataclass_types: one dataclass or several.
        argv: the command line without the name of the program. By default `sys.argv[1:]`.
        prog: name of the program in `--help`.
        description: text in `--help`.
        defaults: values that replace the defaults of the dataclasses; names that none of them has are ignored.

    Returns:
        One instance of each dataclass, in the given order.

    Raises:
        FileNotFoundError: the YAML file does not exist.
        ValueError: the YAML file is not a flat mapping, refers to itself, is too large or nested too deeply, or has a
            key twice, a key that no dataclass has, or a value that its argument does not accept; or a dataclass
            refuses its values; or two dataclasses have fields of one name and different types.
        SystemExit: the command line is wrong; argparse prints the reason to stderr.
    """
    types = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types)
    optional = _optional_arguments(types)
    parser = _build(types, prog, description)
    arguments = _actions_by_name(parser, optional)

    before = ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument(f"--{_CONFIG}")
    config, rest = before.parse_known_args(argv)
    given = {name: value for name, value in _flat(types, defaults or {}).items() if name in arguments}
    if config.config is not None:
        given.update(_read(Path(config.config), arguments, optional))
    parser.set_defaults(**given)  # for the text of --help only; the values are taken from `given`
    for name in given:
        arguments[name].required = False

    namespace, unknown = parser.parse_known_args(rest, Namespace(**dict.fromkeys(arguments, _UNSET)))
    if unknown:
        parser.error(_unrecognized(unknown, parser))
    given.update((name, value) for name in arguments if (value := getattr(namespace, name)) is not _UNSET)
    return tuple(_filled(kind, given) for kind in types)


class _Help(Action):
    """`--help` prints the options that one needs first, and `--help all` prints all of them."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None) -> None:
        parser.usage = f"{parser.prog} [options]"
        from hf_trak.config import TrakConfig

        later = set[str]()
        if values != "all":
            later = {option.name for option in _options(TrakConfig)}.difference(_SETTINGS).union(_RARE)
        for action in parser._actions:
            names = [text for text in action.option_strings if "-" not in text.lstrip("-")]
            action.option_strings = names if values == "all" else names[-1:]
            if action.choices is None and action.metavar is None:
                action.metavar = names[-1].rpartition("_")[2].lstrip("-").upper()
            if action.const is True:  # a switch
                action.nargs = 0
            if action.default is None:
                action.default = SUPPRESS
            if action.dest in later:
                action.help = SUPPRESS
                parser.epilog = f"`{parser.prog} --help all` prints all options."
        parser.print_help()
        parser.exit()


class _Parser(HfArgumentParser):
    """A parser whose errors are one line, since the usage with all options would push them off the screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}. See `{self.prog} --help`.\n")

    def _get_value(self, action: Action, arg_string: str) -> Any:
        try:
            value = super()._get_value(action, arg_string)
        except ArgumentError as error:
            raise self._refusal(action, arg_string) from error
        if action.choices is not None and value not in action.choices:
            raise self._refusal(action, arg_string)
        return value

    def _refusal(self, action: Action, text: str) -> ArgumentError:
        return ArgumentError(None, f"`{action.option_strings[0]}` is {text!r}. Expected {_expected(action)}")


@dataclass(frozen=True)
class _Option:
    """One argument: its name, its field with type and help, and the field that holds the dataclass of that one."""

    name: str
    field: dataclasses.Field
    hint: Any
    help: str | None
    outer: str | None = None


def _options(kind: Any) -> Iterator[_Option]:
    """List the arguments of a dataclass, those of a field that is a dataclass one by one."""
    declared, documented = get_type_hints(kind), dict(_DOCUMENTED.findall(inspect.cleandoc(kind.__doc__ or "")))
    for one in dataclasses.fields(kind):
        if one.init and dataclasses.is_dataclass(declared[one.name]):
            for place, inner in enumerate(_options(declared[one.name])):
                name = f"{one.name}_{inner.name}" if place else one.name
                yield dataclasses.replace(inner, name=name, outer=one.name)
        elif one.init:
            sentences = re.split(r"(?<=\.) (?=[A-Z])", " ".join(documented.get(one.name, "").split()))
            yield _Option(one.name, one, declared[one.name], sentences[0] or None)


def _flat(types: Iterable[type], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names of arguments, those of inner dataclasses one by one."""
    nested = {name for name, value in values.items() if isinstance(value, Mapping)}
    flat = dict(values)
    for option in (option for kind in types for option in _options(kind) if option.outer in nested):
        flat.pop(option.name, None)
        if option.field.name in values[str(option.outer)]:
            flat[option.name] = values[str(option.outer)][option.field.name]
    return flat


def _filled(kind: Any, given: Mapping[str, Any]) -> Any:
    """Make a dataclass, and the dataclasses in it, from the values of arguments."""
    values: dict[str, Any] = {}
    for option in _options(kind):
        if option.name in given:
            place = values if option.outer is None else values.setdefault(option.outer, {})
            place[option.field.name] = given[option.name]
    return kind(**values)


def _optional_arguments(types: Iterable[type]) -> dict[str, bool]:
    """Collect the name of every argument, and whether it can be `None` in all dataclasses that have it.

    Raises:
        ValueError: two dataclasses have fields of one name and different types, or the parser itself uses a name.
    """
    owners: dict[str, tuple[type, Any]] = {}
    optional: dict[str, bool] = {}
    for kind in types:
        for option in _options(kind):
            name = option.name
            if name == _CONFIG:
                raise ValueError(
                    f"`{kind.__name__}` has a field named '{_CONFIG}'. Expected another name, since `--{_CONFIG}` "
                    "names the YAML file."
                )
            owner, hint = owners.setdefault(name, (kind, option.hint))
            if _without_none(option.hint) != _without_none(hint):
                raise ValueError(
                    f"`{name}` is {hint} in `{owner.__name__}` and {option.hint} in `{kind.__name__}`. Expected "
                    "one type, since both are filled from one argument. Rename one of the fields."
                )
            optional[name] = optional.get(name, True) and NoneType in get_args(option.hint)
    return optional


def _without_none(hint: Any) -> frozenset[Any]:
    return frozenset(get_args(hint) or (hint,)) - {NoneType}


def _build(types: Iterable[type], prog: str | None, description: str | None) -> HfArgumentParser:
    """Build the parser from copies of the dataclasses, with each name once and `%` in help texts escaped.

    Copies are needed because `HfArgumentParser` changes the types of the fields that it is given.
    """
    seen: set[str] = set()
    copies: list[Any] = []
    for kind in types:
        specs = []
        for option in _options(kind):
            if option.name in seen:
                continue
            seen.add(option.name)
            metadata = {"help": option.help, **option.field.metadata}
            if metadata["help"]:
                metadata["help"] = _PERCENT.sub(lambda m: "%%" if m[0] == "%" else m[0], metadata["help"])
            default, factory = option.field.default, option.field.default_factory
            copied = dataclasses.field(default=default, default_factory=factory, metadata=metadata)
            specs.append((option.name, _as_text(option.hint), copied))
        copies.append(dataclasses.make_dataclass(kind.__name__, specs, kw_only=True))
        copies[-1]._argument_group_name = kind.__name__
    parser = _Parser(copies, prog=prog, description=description, allow_abbrev=False, add_help=False)
    parser.add_argument(
        "-h",
        "--help",
        action=_Help,
        nargs="?",
        choices=["all"],
        default=SUPPRESS,
        help="Print options, or all of them.",
    )
    parser.add_argument(f"--{_CONFIG}", metavar="FILE", help="YAML file of defaults for all of these arguments.")
    return parser


def _as_text(hint: Any) -> Any:
    """Return text for a number or a text, which the dataclass tells apart: an argument has one type."""
    if not {int, str} <= _without_none(hint):
        return hint
    return str | None if NoneType in get_args(hint) else str


def _actions_by_name(parser: ArgumentParser, names: Iterable[str]) -> dict[str, Action]:
    """Find the argument of each field; its complement `--no_…` has the same destination and is left out."""
    return {
        action.dest: action
        for action in parser._actions
        if action.dest in names and action.option_strings[0] == f"--{action.dest}"
    }


def _unrecognized(unknown: Sequence[str], parser: ArgumentParser) -> str:
    options = {text.lstrip("-").replace("-", "_") for action in parser._actions for text in action.option_strings}
    names = [text.split("=", 1)[0].lstrip("-").replace("-", "_") for text in unknown if text.startswith("-")]
    near = {match for name in names for match in difflib.get_close_matches(name, options, n=2)}
    hint = f" (did you mean {' or '.join(f'--{name}' for name in sorted(near))}?)" if near else ""
    return f"unrecognized arguments: {' '.join(unknown)}{hint}"


# -- YAML ------------------------------------------------------------------------------------------------------------


class _TextLoader(yaml.SafeLoader):
    """Loads scalars other than `null` as text, so that `2e-5` and `0123` reach an argument as from the command line.

    A key that appears twice is an error.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        counts = Counter(str(key.value) for key, _ in node.value)
        if twice := sorted(key for key, count in counts.items() if count > 1):
            raise yaml.MarkedYAMLError(problem=f"the keys {twice} are there twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


_TextLoader.yaml_implicit_resolvers = {
    first: kept
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    if (kept := [(tag, pattern) for tag, pattern in resolvers if tag == _NULL])
}


def _read(path: Path, arguments: Mapping[str, Action], optional: Mapping[str, bool]) -> dict[str, Any]:
    """Read a YAML file, and convert its values."""
    if not path.is_file():
        raise FileNotFoundError(f"`--{_CONFIG}` is {str(path)!r}, which is not a file. Expected a YAML file.")
    text = _text(path)
    try:
        check_yaml(text, MAX_YAML_BYTES)
        content = yaml.load(text, Loader=_TextLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}. Expected `name: value` lines.") from error
    except ValueError as error:
        raise ValueError(f"{path} was refused: {error}. Expected `name: value` lines.") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}. Expected a mapping, with `name: value` lines.")
    if unknown := [name for name in content if name not in arguments]:
        raise ValueError(
            f"{path} sets {', '.join(_with_nearest(str(name), arguments) for name in unknown)}. Expected names of "
            "arguments; `--help` lists them."
        )
    return {name: _convert(path, arguments[name], optional[name], value, text) for name, value in content.items()}


def _text(path: Path) -> str:
    """Read the text of a YAML file, unless it is too large."""
    size = path.stat().st_size
    if size > MAX_YAML_BYTES:
        raise ValueError(
            f"{path} has {size} bytes. Expected at most {MAX_YAML_BYTES}, for a file of arguments. Is it another file?"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error}). Expected a YAML file. Save it as UTF-8.") from error


def _with_nearest(name: str, arguments: Mapping[str, Action]) -> str:
    nearest = difflib.get_close_matches(name, arguments, n=3)
    return f"'{name}', which no argument is called" + (f" (nearest: {', '.join(nearest)})" if nearest else "")


def _convert(path: Path, action: Action, optional: bool, value: Any, text: str) -> Any:
    """Convert a value of the YAML file with this text, as the command line would convert and check it."""
    if value is None:
        if not optional:
            raise ValueError(
                f"{path}: `{action.dest}` is null. Expected {_expected(action)}. Give a value or leave it out."
            )
        return None
    if action.nargs == "+":
        if not isinstance(value, list):
            raise ValueError(f"{path}: `{action.dest}` is {value!r}. Expected a list: `{action.dest}: [{value}]`.")
        return [_convert_text(path, action, item) for item in value]
    # Dictionaries are JSON on the command line.
    return _convert_text(path, action, _as_json(path, action.dest, text) if isinstance(value, Mapping) else value)


def _as_json(path: Path, name: str, text: str) -> str:
    """Return the value of one key as JSON, its scalars with the types that YAML gives them."""
    try:
        return json.dumps(yaml.safe_load(text)[name])
    except (TypeError, ValueError) as error:  # dates, NaN and infinities
        raise ValueError(
            f"{path}: `{name}` is not plain data ({error}). Expected numbers, texts and lists."
        ) from error


def _convert_text(path: Path, action: Action, text: Any) -> Any:
    problem = ValueError(f"{path}: `{action.dest}` is {text!r}. Expected {_expected(action)}.")
    if not isinstance(text, str):
        raise problem
    try:
        value = action.type(text) if callable(action.type) else text
    except (ValueError, TypeError, ArgumentTypeError) as error:
        raise problem from error
    if action.choices is not None and value not in action.choices:
        raise problem
    return value


def _expected(action: Action) -> str:
    if action.choices is not None:
        return f"one of {list(action.choices)}"
    name = getattr(action.type, "__name__", "text")
    known = {"int": "an integer", "float": "a number", "str": "text", "string_to_bool": "true or false"}
    return known.get(name, name)


def option(text: str, default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """Declare an argument as a field of a dataclass.

    Args:
        text: what `--help` says of it.
        default: its value where it is not given; without one it has to be.
        more: `default_factory` in place of `default`, and `aliases`.
    """
    aliases = {"aliases": more.pop("aliases")} if "aliases" in more else {}
    return dataclasses.field(default=default, metadata={"help": text, **aliases}, **more)


@dataclass
class OutputArguments:
    """The form of a command's output."""

    json: bool = option("Print one JSON object, for scripts.", False)


@dataclass
class ModelArguments:
    """The model and its weights."""

    model_name_or_path: str | None = option("Model on the Hub, or its directory.", None, aliases=["--model"])
    model_revision: str = option("Branch, tag or commit of a model on the Hub.", "main")
    task: str | None = option("Name of the model output function. By default it follows from the model.", None)
    checkpoints: list[str] | None = option(
        "Directories or files of weights; scores are averaged over them. By default the model's own.", None
    )


@dataclass
class ColumnArguments:
    """The columns of a dataset."""

    text_columns: list[str] | None = option(
        "Columns of text, two for pairs. By default those whose names leave no choice.", None
    )
    image_column: str | None = option("Column of images. By default the only one.", None)
    label_column: str | None = option("Column of labels. By default `labels` or `label`.", None)


@dataclass
class DataArguments(ColumnArguments):
    """The rows that the model was trained on."""

    dataset_name: str | None = option(
        "Training rows: a dataset on the Hub, a directory of `save_to_disk`, a data file (.json, .jsonl, "
        ".csv, .parquet, .txt, .arrow), or a directory that `load_dataset` reads.",
        None,
        aliases=["--train_dataset"],
    )
    dataset_config_name: str | None = option("Configuration of the training dataset.", None)
    train_split: str | None = option("Split of the training rows. By default `train`, or the only one.", None)
    max_train_samples: int | None = option("Number of rows, evenly spaced.", None)
    max_length: int | None = option(
        "Length in tokens to which texts are truncated. By default the longest that the tokenizer allows.", None
    )

    def __post_init__(self) -> None:
        for name in ("max_train_samples", "max_length", "max_eval_samples"):
            value = getattr(self, name, None)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}. Expected at least 1.")


@dataclass
class TargetArguments:
    """The rows to explain."""

    eval_dataset_name: str | None = option(
        "Targets, in the same forms as `dataset_name`. By default another split of that dataset.",
        None,
        aliases=["--eval_dataset"],
    )
    eval_dataset_config_name: str | None = option("Configuration of the target dataset.", None)
    eval_split: str | None = option("Split of the targets. By default `test` or `validation`, or the only one.", None)
    max_eval_samples: int | None = option("Number of targets, evenly spaced.", None)


def answer(content: Mapping[str, Any], lines: Iterable[str], as_json: bool) -> None:
    """Print the result of a command, in the process of rank 0."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    if as_json:
        print(json.dumps(_finite(content), indent=2, ensure_ascii=False, default=str))
    else:
        for line in lines:
            print(line)


def _finite(value: Any) -> Any:
    """Put null in the place of NaN and infinities, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def table(rows: Mapping[str, Any]) -> list[str]:
    """Format names and values in two columns."""
    width = max((len(name) for name in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def size(count: float) -> str:
    """Format a number of bytes, in powers of 1000."""
    if count < 1000:
        return f"{count:.0f} bytes"
    unit = "kB"
    for larger in ("MB", "GB", "TB"):
        if count < 1e6:
            break
        count, unit = count / 1000, larger
    return f"{count / 1000:.1f} {unit}"
