"""The parser of recipes: YAML sets defaults, the command line overrides, and both are checked alike."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from transformers import TrainingArguments

from hf_trak.cli.parser import DataArguments, answer, parse_yaml_and_args
from hf_trak.config import TrakConfig


@dataclass
class Run:
    output_dir: str = field(default="outputs", metadata={"help": "Where results go."})
    kind: Literal["cnn", "vit"] = field(default="cnn", metadata={"help": "Keeps 50 % of it, or 100%% (default)."})
    lam: float = 0.5
    steps: int = field(default=10, metadata={"help": "How many."})
    names: list[str] = field(default_factory=list)
    sizes: list[int] | None = None
    keep: bool = True
    loud: bool = False
    limit: int | None = 7
    note: str = ""


def write(path: Path, text: str) -> list[str]:
    file = path / "config.yaml"
    file.write_text(text)
    return ["--config", str(file)]


def test_defaults_are_those_of_the_dataclasses():
    run, trak = parse_yaml_and_args((Run, TrakConfig), [])
    assert run == Run()
    assert trak == TrakConfig()  # output_dir included, although both classes have one


def test_yaml_values_are_converted_like_command_line_text(tmp_path):
    yaml = """
    lam: 2e-5        # YAML 1.1 reads this as a string
    steps: 0x10
    names: [a.b, 0123]
    sizes: [3, 4]
    keep: no
    loud: true
    limit: null
    note: 0123       # and this as an octal number
    kind: vit
    """
    with pytest.raises(ValueError, match=r"`steps` is '0x10'. Expected an integer"):
        parse_yaml_and_args(Run, write(tmp_path, yaml))
    (run,) = parse_yaml_and_args(Run, write(tmp_path, yaml.replace("0x10", "16")))
    assert run == Run(
        lam=2e-5,
        steps=16,
        names=["a.b", "0123"],
        sizes=[3, 4],
        keep=False,
        loud=True,
        limit=None,
        note="0123",
        kind="vit",
    )
    assert isinstance(run.lam, float)


def test_command_line_overrides_yaml_wherever_it_stands(tmp_path):
    config = write(tmp_path, "lam: 1.5\nsteps: 3\nkeep: false\nlimit: 9\nnames: [x]\n")
    for argv in (["--steps", "4", *config, "--names", "y", "z"], [*config, "--names", "y", "z", "--steps=4"]):
        (run,) = parse_yaml_and_args(Run, argv)
        assert run == Run(lam=1.5, steps=4, keep=False, limit=9, names=["y", "z"])
    (run,) = parse_yaml_and_args(Run, [*config, "--keep", "true", "--limit", "7"])  # back to the dataclass's defaults
    assert (run.keep, run.limit) == (True, 7)


def test_booleans_are_those_of_hf_argument_parser(tmp_path):
    assert parse_yaml_and_args(Run, ["--loud", "--no_keep"])[0] == Run(loud=True, keep=False)
    assert parse_yaml_and_args(Run, ["--loud", "yes", "--keep", "false"])[0] == Run(loud=True, keep=False)
    assert parse_yaml_and_args(Run, [*write(tmp_path, "loud: true\nkeep: true"), "--no-keep"])[0].keep is False


def test_a_shared_name_is_one_argument_for_all(tmp_path):
    run, trak = parse_yaml_and_args((Run, TrakConfig), ["--output_dir", "there", "--proj_dim", "64"])
    assert (run.output_dir, trak.output_dir, trak.proj_dim) == ("there", "there", 64)
    run, trak = parse_yaml_and_args((Run, TrakConfig), write(tmp_path, "output_dir: here"))
    assert (run.output_dir, trak.output_dir) == ("here", "here")

    @dataclass
    class Other:
        steps: str = "many"

    with pytest.raises(ValueError, match=r"`steps` is <class 'int'> in `Run` and <class 'str'> in `Other`"):
        parse_yaml_and_args((Run, Other), [])


def test_null_only_where_every_owner_allows_it(tmp_path):
    @dataclass
    class Other:
        limit: int = 3

    with pytest.raises(ValueError, match=r"`limit` is null. Expected an integer"):
        parse_yaml_and_args((Run, Other), write(tmp_path, "limit: null"))
    with pytest.raises(ValueError, match="`note` is null"):
        parse_yaml_and_args(Run, write(tmp_path, "note:"))
    assert parse_yaml_and_args(Run, write(tmp_path, "note: 'null'"))[0].note == "null"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: resnet", r"`kind` is 'resnet'. Expected one of \['cnn', 'vit'\]"),
        ("lam: big", "`lam` is 'big'. Expected a number"),
        ("steps: 1.5", "`steps` is '1.5'. Expected an integer"),
        ("keep: maybe", "`keep` is 'maybe'. Expected true or false"),
        ("names: a", r"`names` is 'a'. Expected a list: `names: \[a\]`"),
        ("sizes: [1, x]", "`sizes` is 'x'. Expected an integer"),
        ("sizes: [1, [2]]", "`sizes` is .*2.*. Expected an integer"),
        ("steps: [1]", "`steps` is .*1.*. Expected an integer"),
        ("outptu_dir: x", "'outptu_dir', which no argument is called .nearest: output_dir"),
        ("lam: 1\nlam: 2", "the keys .'lam'. are there twice"),
        ("- lam", "holds a list. Expected a mapping"),
        ("lam: [1", "is not valid YAML"),
    ],
)
def test_wrong_yaml_is_an_error_that_names_the_file(tmp_path, text, message):
    argv = write(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        parse_yaml_and_args(Run, argv)
    assert argv[1] in str(caught.value)


def test_empty_yaml_and_missing_yaml(tmp_path):
    assert parse_yaml_and_args(Run, write(tmp_path, "# nothing\n"))[0] == Run()
    with pytest.raises(FileNotFoundError, match=r"missing.yaml"):
        parse_yaml_and_args(Run, ["--config", str(tmp_path / "missing.yaml")])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kind", "resnet"], "`--kind` is 'resnet'. Expected one of ["),
        (["--lam", "big"], "`--lam` is 'big'. Expected a number."),
        (["--stepz", "3"], "did you mean --steps?"),
        (["--step", "3"], "unrecognized arguments: --step 3"),  # no abbreviations
    ],
)
def test_wrong_command_line_exits_with_one_line(capsys, argv, message):
    with pytest.raises(SystemExit) as caught:
        parse_yaml_and_args(Run, argv)
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert message in text and "--help" in text and len(text.splitlines()) == 1


def test_help_survives_percent_signs_and_shows_the_defaults_of_the_yaml(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_yaml_and_args(Run, [*write(tmp_path, "steps: 4711"), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "Keeps 50 % of it, or 100% (default)." in text
    assert "How many. (default: 4711)" in text
    assert "--config FILE" in text


def test_required_fields_can_come_from_the_yaml(tmp_path, capsys):
    @dataclass
    class Needs:
        name: str
        count: int = 1

    assert parse_yaml_and_args(Needs, write(tmp_path, "name: x"))[0] == Needs("x")
    with pytest.raises(SystemExit):
        parse_yaml_and_args(Needs, ["--count", "2"])
    assert "--name" in capsys.readouterr().err


def test_there_is_at_least_one_row() -> None:
    assert DataArguments(max_train_samples=1).max_train_samples == 1
    with pytest.raises(ValueError, match=r"`max_train_samples` is 0\. Expected at least 1"):
        DataArguments(max_train_samples=0)


def test_dataclasses_validate_themselves_and_stay_as_they_were(tmp_path):
    before = {item.name: item.type for item in dataclasses.fields(TrakConfig)}
    with pytest.raises(ValueError, match="`proj_dim` is 0"):
        parse_yaml_and_args(TrakConfig, write(tmp_path, "proj_dim: 0"))
    with pytest.raises(ValueError, match=r"`proj_type` is 'gauss'. Expected one of"):
        parse_yaml_and_args(TrakConfig, write(tmp_path, "proj_type: gauss"))
    assert {item.name: item.type for item in dataclasses.fields(TrakConfig)} == before


def test_a_field_named_config_is_refused():
    @dataclass
    class Bad:
        config: str = ""

    with pytest.raises(ValueError, match="field named 'config'"):
        parse_yaml_and_args(Bad, [])


def test_training_arguments_and_trak_config_fit_one_command_line(tmp_path):
    yaml = (
        "output_dir: here\nlearning_rate: 2e-5\nlr_scheduler_kwargs: {min_lr: 1.0e-6}\nuse_cpu: true\nproj_dim: 128\n"
    )
    training, trak = parse_yaml_and_args((TrainingArguments, TrakConfig), [*write(tmp_path, yaml), "--seed", "3"])
    assert training.learning_rate == 2e-5
    assert training.lr_scheduler_kwargs == {"min_lr": 1e-6}
    assert (training.use_cpu, trak.use_cpu, training.seed, trak.seed) == (True, True, 3, 3)
    assert (training.output_dir, trak.output_dir, trak.proj_dim) == ("here", "here", 128)


def test_argv_defaults_to_the_program_s_own(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["script.py", *write(tmp_path, "proj_dim: 5"), "--proj_dim", "6"])
    assert parse_yaml_and_args(TrakConfig)[0].proj_dim == 6


def test_defaults_of_the_caller_stand_below_yaml_and_command_line(tmp_path):
    given = {"steps": 5, "lam": 9.0, "note": "kept", "nobody_has": 1}
    argv = [*write(tmp_path, "lam: 1.5\nsteps: 3\n"), "--steps", "10"]  # 10 is the dataclass's own default
    assert parse_yaml_and_args(Run, argv, defaults=given)[0] == Run(lam=1.5, steps=10, note="kept")


def test_an_alias_is_suggested_too(capsys):
    @dataclass
    class Model:
        model_name_or_path: str | None = field(default=None, metadata={"aliases": ["--model"]})

    with pytest.raises(SystemExit):
        parse_yaml_and_args(Model, ["--modle", "x"])
    assert "did you mean --model?" in capsys.readouterr().err


def test_json_has_no_number_that_is_none(capsys):
    none, most = float("nan"), float("inf")
    answer({"loss": none, "parts": [1.5, (most, 2)], "named": {"low": -most}}, [], as_json=True)
    found = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(text))
    assert found == {"loss": None, "parts": [1.5, [None, 2]], "named": {"low": None}}
