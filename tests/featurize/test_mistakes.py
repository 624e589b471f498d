"""Mistakes that users make: each message has what was given, what was expected and what to do."""

import builtins
import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, disable_progress_bars
from doc_examples import documents, sentences, tiny_bert, tiny_gpt2, word_tokenizer
from transformers import Trainer, TrainingArguments

from hf_trak import CurvatureConfig, Exact, Index, Replay, Rerank, Span, TrakAttributor, TrakConfig, TRAKer
from hf_trak.callbacks import TrakCallback
from hf_trak.cli.main import main
from hf_trak.data.columns import require_class_numbers
from hf_trak.errors import SingularGramError

SENTENCE_END = re.compile(r"[.!?][`'\")]*(?=\s+[`A-Z'\[{])")
OPTIONS: dict[str, Any] = {"proj_dim": 64, "use_cpu": True}
ROWS = sentences(24)
FEW = ROWS.select([0, 1])
DOCUMENT = documents(word_tokenizer(), 12).select([0])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Featurized attributors of a classifier and a language model, a trainer with checkpoints, files in `home`."""
    disable_progress_bars()
    torch.manual_seed(0)
    home, words = tmp_path_factory.mktemp("home"), word_tokenizer()
    (home / "file").write_text("x")

    def new(name: str = "new", model: Any = None, rows: Any = ROWS, **options: Any) -> TrakAttributor:
        return TrakAttributor(tiny_bert() if model is None else model, config(name, **options), rows)

    def config(name: str = "new", **options: Any) -> TrakConfig:
        return TrakConfig(str(home / name), **{**OPTIONS, **options})

    args = TrainingArguments(
        str(home / "out"), report_to="none", use_cpu=True, max_steps=2, save_steps=1, disable_tqdm=True
    )
    trainer = Trainer(model=tiny_bert(), args=args, train_dataset=ROWS)
    trainer.train()
    nan = tiny_bert()
    with torch.no_grad():
        nan.classifier.weight.fill_(float("nan"))
    model = tiny_bert()
    own = new("own", model).featurize()
    lm = TrakAttributor(tiny_gpt2(), config("lm"), documents(words, 12), processing_class=words).featurize()
    return SimpleNamespace(
        home=home, new=new, config=config, args=args, trainer=trainer, nan=nan, model=model, own=own, lm=lm
    )


def named(*classes: str) -> Dataset:
    """Two rows with named classes, numbered in this order."""
    return FEW.cast_column("labels", ClassLabel(names=list(classes)))


Mistake = tuple[Callable[[Any], Any], str, str]

CALLS: dict[str, Mistake] = {
    # what an attributor is made of
    "the name of a model": (
        lambda w: TrakAttributor("bert", w.config(), ROWS),
        r"`model` is 'bert'",
        "from_pretrained",
    ),
    "no training rows": (lambda w: TrakAttributor(w.model), r"`train_dataset` is None", "`train_dataset=...`"),
    "rows in place of the config": (lambda w: TrakAttributor(w.model, ROWS), r"`args` is a Dataset", "TrakConfig("),
    "a dict as config": (
        lambda w: TrakAttributor(w.model, OPTIONS, ROWS),
        r"\['proj_dim', 'use_cpu'\]",
        "TrakConfig(**",
    ),
    "all splits": (
        lambda w: w.new(rows=DatasetDict(train=ROWS)),
        r"DatasetDict, with the keys \['train'\]",
        "['train']",
    ),
    "an empty list": (lambda w: w.new(rows=[]), "`train_dataset` is empty", "Check how it was loaded"),
    "the name of a dataset": (lambda w: w.new(rows="imdb"), "the text 'imdb'", "load_dataset"),
    "a stream": (
        lambda w: w.new(rows=ROWS.to_iterable_dataset()),
        "IterableDataset, which has no length",
        "StreamedRows",
    ),
    "texts as rows": (lambda w: w.new(rows=["a film"]).featurize(), "are texts, such as 'a film'", "tokenizer(rows"),
    "a task that is misspelt": (
        lambda w: TrakAttributor(w.model, w.config(), ROWS, task="text_clasification"),
        r"'text_clasification' is unknown",
        "did you mean 'text_classification'?",
    ),
    "a number as task": (
        lambda w: TrakAttributor(w.model, w.config(), ROWS, task=3),
        "`task` is 3",
        "AbstractModelOutput",
    ),
    "a model without a head": (
        lambda w: w.new(model=torch.nn.Linear(2, 2)),
        "No task is known for a Linear",
        "`task=`",
    ),
    "dataset=": (
        lambda w: TrakAttributor(w.model, w.config(), dataset=ROWS),
        "no argument `dataset`",
        "`train_dataset`",
    ),
    "an array as rows": (
        lambda w: w.new("array", rows=torch.zeros(4, 3).numpy()).featurize(),
        "type ndarray, without names",
        "Dataset.from_dict",
    ),
    "a row without a label": (
        lambda w: w.new(
            "unlabelled", rows=[{"input_ids": [1, 2], "labels": label} for label in (0, None)]
        ).featurize(),
        "`labels` of row 1 of a batch is None",
        "Leave rows without labels out",
    ),
    "no column for the model": (
        lambda w: w.new(rows=ROWS.select_columns(["text"])).featurize(),
        r"it has \['text'\]",
        "Rename the columns",
    ),
    "weights that are NaN": (
        lambda w: w.new("nan", w.nan).featurize(),
        "train row 0 is not finite",
        "Look at that row",
    ),
    "a function of one argument": (
        lambda w: TrakAttributor(w.model, w.config(), ROWS, task=lambda output: output),
        "`output_fn` is <function",
        "(model_output, batch)",
    ),
    "a name as collator": (
        lambda w: TrakAttributor(w.model, w.config(), ROWS, data_collator="pad"),
        "`data_collator` is a str",
        "a list of rows",
    ),
    "a tokenizer as collator": (
        lambda w: TrakAttributor(w.model, w.config(), ROWS, data_collator=word_tokenizer()),
        "`data_collator` is a TokenizersBackend",
        "`processing_class=`",
    ),
    "the name of a tokenizer": (
        lambda w: TrakAttributor(w.model, w.config(), ROWS, processing_class="bert"),
        "`processing_class` is 'bert'",
        "AutoTokenizer",
    ),
    # the configuration
    "proj_dimm=": (lambda w: TrakConfig(proj_dimm=3), "no argument `proj_dimm`", "did you mean `proj_dim`?"),
    "batch_size=": (lambda w: TrakConfig(batch_size=3), "no argument `batch_size`", "per_device_batch_size"),
    "a negative width": (lambda w: TrakConfig(proj_dim=-5), "`proj_dim` is -5", "at least 1"),
    "a width in words": (lambda w: TrakConfig(proj_dim="big"), "`proj_dim` is 'big'", "'512B'"),
    "a projection": (lambda w: TrakConfig(proj_type="gaussian"), "`proj_type` is 'gaussian'", "'normal'"),
    "a seed": (lambda w: TrakConfig(seed=-1), "`seed` is -1", "from 0 to"),
    "an engine": (lambda w: TrakConfig(engine="fast"), "`engine` is 'fast'", "'hooked'"),
    "a dtype": (lambda w: TrakConfig(feature_dtype="fp16"), "`feature_dtype` is 'fp16'", "'float16'"),
    "a dtype of torch": (
        lambda w: TrakConfig(model_dtype=torch.bfloat16),
        "`model_dtype` is torch.bfloat16",
        "'bfloat16'",
    ),
    "a negative ridge": (lambda w: TrakConfig(lambda_relative=-1), "`lambda_relative` is -1", "at least 0"),
    "a solver": (lambda w: TrakConfig(solver="lu"), "`solver` is 'lu'", "'dual'"),
    "no rows in a batch": (
        lambda w: TrakConfig(per_device_batch_size=0),
        "`per_device_batch_size` is 0",
        "at least 1",
    ),
    "a yes for a switch": (lambda w: TrakConfig(use_cpu="no"), "`use_cpu` is 'no'", "True, False"),
    "a number as directory": (lambda w: TrakConfig(512), "`output_dir` is 512", "path of a directory"),
    "a file as directory": (lambda w: w.new("file").featurize(), "file', which is a file", "Name another one"),
    "one parameter as a text": (lambda w: TrakConfig(grad_wrt="head"), "`grad_wrt` is 'head'", "a list"),
    "a parameter that is misspelt": (
        lambda w: w.new(grad_wrt=["clasifier.weight"]),
        r"names \['clasifier.weight'\]",
        "`model.named_parameters()`",
    ),
    "a number as parameters": (lambda w: TrakConfig(grad_wrt=3), "`grad_wrt` is 3", "a list"),
    "one label as a text": (lambda w: TrakConfig(label_names="labels"), "`label_names` is 'labels'", "a list"),
    "no parameters": (lambda w: w.new(grad_wrt=[]), "No parameter is left", "pass `None` for all"),
    "a curvature": (lambda w: TrakConfig(curvature="ek-fac"), "`curvature.kind` is 'ek-fac'", "'ekfac'"),
    "dampng=": (lambda w: CurvatureConfig(dampng=1), "no argument `dampng`", "did you mean `damping`?"),
    "another seed for the same directory": (
        lambda w: w.new("own", w.model, seed=5).featurize(),
        "seed: saved 0, given 5",
        "another output directory",
    ),
    "another model for the same directory": (
        lambda w: w.new("own").featurize(),
        "Model id 0 is tied to the weights",
        "another output directory",
    ),
    # from a trainer
    "a model as trainer": (
        lambda w: TrakAttributor.from_trainer(w.model),
        "`trainer` is a Bert",
        "TrakAttributor(model",
    ),
    "output_dir= of from_trainer": (
        lambda w: TrakAttributor.from_trainer(w.trainer, output_dir="x"),
        "no argument `output_dir`",
        "'args'",
    ),
    "no trainer": (lambda w: TrakAttributor.from_trainer(), "without `trainer`", "Pass it"),
    "arguments of the training": (
        lambda w: TrakAttributor.from_trainer(w.trainer, w.args),
        "`args` is a TrainingArguments",
        "TrakConfig(",
    ),
    "the directory of the training": (
        lambda w: TrakAttributor.from_trainer(w.trainer, w.config("out")),
        "the trainer's own",
        "for example",
    ),
    "a trainer without rows": (
        lambda w: TrakAttributor.from_trainer(Trainer(tiny_bert(), w.args), w.config()),
        "no `train_dataset`",
        "give the trainer",
    ),
    # features
    "checkpoint=": (
        lambda w: w.own.featurize(checkpoint="x"),
        "no argument `checkpoint`",
        "did you mean `checkpoints`?",
    ),
    "a checkpoint that is not there": (
        lambda w: w.new().featurize(str(w.home / "out/checkpoint-9")),
        "checkpoint-9' does not exist",
        "'checkpoint-2'",
    ),
    "a directory without weights": (lambda w: w.new().featurize(str(w.home)), "holds no weights", "model.safetensors"),
    "a directory of checkpoints": (
        lambda w: w.new().featurize(str(w.home / "out")),
        r"holds no weights, but \['checkpoint-1', 'checkpoint-2'\]",
        "/out/checkpoint-2'",
    ),
    "numbers of checkpoints": (lambda w: w.new().featurize([1, 2]), r"`checkpoints` is \[1, 2\]", "{id: weights}"),
    "a number as weights": (lambda w: w.new("no").featurize(3), "`checkpoints` is 3", "`[3]`"),
    "no checkpoints": (lambda w: w.new().featurize([]), "`checkpoints` is empty", "`None`"),
    "a part beyond the last": (lambda w: w.new().featurize(part=(3, 2)), r"`part` is \(3, 2\)", "such as"),
    # targets
    "no targets": (lambda w: w.own.attribute(), "`attribute` is called without `eval_dataset`", "Pass it"),
    "texts as targets": (lambda w: w.own.attribute(["a film"]), "are texts, such as 'a film'", "tokenizer(rows"),
    "one text": (lambda w: w.own.attribute("a film"), "the text 'a film'", "Dataset.from_list"),
    "one row": (lambda w: w.own.attribute(FEW[0]), "`eval_dataset` is a dict", "Dataset.from_list"),
    "all splits as targets": (lambda w: w.own.attribute(DatasetDict(test=FEW)), r"keys \['test'\]", "one split"),
    "empty targets": (lambda w: w.own.attribute(FEW.select([])), "`eval_dataset` is empty", "filtered"),
    "targets without labels": (
        lambda w: w.own.attribute(FEW.select_columns(["input_ids"])),
        r"\['input_ids'\]",
        "`attributor.predict(rows)`",
    ),
    "labels of another name": (
        lambda w: w.own.attribute(FEW.remove_columns("label").rename_column("labels", "sentiment")),
        "none hold labels",
        "Rename the column that has them",
    ),
    "prompts without labels": (
        lambda w: w.lm.attribute(DOCUMENT.select_columns(["input_ids"])),
        "so no labels",
        "`attributor.predict(rows)`",
    ),
    "labels of another model": (
        lambda w: w.own.attribute(Dataset.from_dict({"input_ids": [[1]], "labels": [7]})),
        "label 7",
        "2 classes",
    ),
    "tokens of another model": (
        lambda w: w.own.attribute(Dataset.from_dict({"input_ids": [[1, 99]], "labels": [0]})),
        "token 99",
        "resize",
    ),
    "a token below zero": (
        lambda w: w.own.attribute(Dataset.from_dict({"input_ids": [[1, -100]], "labels": [0]})),
        "token -100",
        "same checkpoint",
    ),
    "no tokens": (
        lambda w: w.own.attribute(Dataset.from_dict({"input_ids": [[]], "labels": [0]})),
        r"`input_ids` of a batch of 1 rows is of torch.float32 and the shape \(1, 0\)",
        "Leave rows without tokens out",
    ),
    "rows of two lengths": (
        lambda w: w.own.attribute(Dataset.from_dict({"input_ids": [[1, 2], [1]], "labels": [0, 1]})),
        "size 2",
        "pads",
    ),
    "classes of another order": (
        lambda w: w.new(rows=named("film", "book")).attribute(named("book", "film")),
        "`labels` of the targets 0 stands for 'book', and in the training rows for 'film'",
        "align_labels_with_mapping({'film': 0, 'book': 1}, 'labels')",
    ),
    "new rows with classes of another order": (
        lambda w: w.new("order", rows=named("film", "book")).featurize().extend(named("book", "film")),
        "`labels` of the new rows 0 stands for 'book'",
        "align_labels_with_mapping",
    ),
    "topk=": (lambda w: w.own.attribute(FEW, topk=5), "no argument `topk`", "did you mean `top_k`?"),
    "a negative top_k": (lambda w: w.own.attribute(FEW, top_k=-1), "`top_k` is -1", "`None` for every score"),
    "a top_k in words": (lambda w: w.own.attribute(FEW, "10"), "`top_k` is '10'", "an integer"),
    "per rows": (lambda w: w.own.attribute(FEW, per="row"), "`per` is 'row'", "'train'"),
    "a curvature as method": (lambda w: w.own.attribute(FEW, method="ekfac"), "`method` is 'ekfac'", "'exact'"),
    "a class as method": (lambda w: w.own.attribute(FEW, method=Exact), "`method` is <class", "Exact(...)"),
    "groups that are misspelt": (
        lambda w: w.own.attribute(FEW, group_by="sorce"),
        "`group_by` is 'sorce'",
        "'source'",
    ),
    "a number as groups": (lambda w: w.own.attribute(FEW, group_by=3), "`group_by` is 3", "one value per row"),
    "a path as name": (lambda w: w.own.attribute(FEW, name="../x"), "`name` is '../x'", "Use letters"),
    "a number as name": (lambda w: w.own.attribute(FEW, name=3), "`name` is 3", "Give a name"),
    "a checkpoint that was not featurized": (
        lambda w: w.own.attribute(FEW, checkpoints=[5]),
        r"ids \[5\]",
        "Call `featurize\\(\\)`",
    ),
    "scores before features": (lambda w: w.new("none").attribute(FEW), "Nothing is featurized", "Call `featurize()`"),
    "tokens of a class": (
        lambda w: w.own.attribute(FEW, per_token=True),
        "one number per target",
        "Leave `per_token` out",
    ),
    "a shortlist shorter than the answer": (
        lambda w: w.own.attribute(FEW, 20, method=Rerank(rows=5)),
        "`rows` of `Rerank` is 5",
        "Raise `rows`",
    ),
    "row= of Rerank": (lambda w: Rerank(row=5), "no argument `row`", "did you mean `rows`?"),
    "share= of Replay": (lambda w: Replay(share=1), "no argument `share`", "Correct the name"),
    "a curvature of Exact": (lambda w: Exact(curvature="ekfc"), "`curvature` is 'ekfc'", "'ekfac'"),
    "candidates without a first pass": (lambda w: Index(candidates=5), "`candidates` is 5", "both or neither"),
    # parts of targets
    "one position": (lambda w: w.lm.attribute(DOCUMENT, part=Span(tokens=[7])), r"`tokens` is \[7\]", "(start, stop)"),
    "a number as position": (
        lambda w: w.lm.attribute(DOCUMENT, part=Span(tokens=7)),
        "`tokens` is 7",
        "(start, stop)",
    ),
    "positions out of range": (
        lambda w: w.lm.attribute(DOCUMENT, part=Span(tokens=(50, 60))),
        "none of its",
        "max_length",
    ),
    "a word that is not there": (
        lambda w: w.lm.attribute(DOCUMENT, part=Span(words="Nara")),
        "'Nara' occurs 0 times",
        "`chars`",
    ),
    "words for other rows": (
        lambda w: w.lm.attribute(DOCUMENT, part=Span(words=["a", "b"])),
        r"\['a', 'b'\] for 1",
        "one for each",
    ),
    "nothing of a target": (lambda w: w.lm.attribute(DOCUMENT, part=Span()), "Given none of", "exactly one"),
    "word=": (lambda w: Span(word="x"), "no argument `word`", "did you mean `words`?"),
    "a text as part": (lambda w: w.lm.attribute(DOCUMENT, part="barn"), "`part` is 'barn'", "Span(words="),
    "a part of a class": (
        lambda w: w.own.attribute(FEW, part=Span(tokens=(0, 1))),
        "`part` is Span",
        "Leave `part` out",
    ),
    # what else is asked
    "groups of training rows that are misspelt": (
        lambda w: w.own.group_scores(FEW, "sorce"),
        "`train_group_by` is 'sorce'",
        "'source'",
    ),
    "groups without targets": (lambda w: w.own.group_scores("sorce"), "without `train_group_by`", "'eval_dataset'"),
    "groups by reranking": (
        lambda w: w.own.group_scores(FEW, "source", method="rerank"),
        "`method` is Rerank",
        "'exact'",
    ),
    "select 2.0": (lambda w: w.own.select(2.0, FEW), "`n` is 2.0", "a fraction between 0 and 1"),
    "select too many": (lambda w: w.own.select(10**6, FEW), "`n` is 1000000", "from 1 to 24"),
    "a criterion": (lambda w: w.own.select(3, FEW, "best"), "`criterion` is 'best'", "'most_helpful'"),
    "strata that are misspelt": (lambda w: w.own.select(3, FEW, stratify_by="lable"), "is 'lable'", "'label'"),
    "a text to continue": (lambda w: w.lm.predict("The fox"), "the text 'The fox'", "Dataset.from_list"),
    "a class to generate": (lambda w: w.own.predict(FEW, max_new_tokens=3), r"\['max_new_tokens'\]", "Leave them out"),
    "max_new_tokns=": (
        lambda w: w.lm.predict(DOCUMENT, max_new_tokns=3),
        "`max_new_tokns`",
        "did you mean `max_new_tokens`?",
    ),
    "an answer of no length": (lambda w: w.lm.predict(DOCUMENT, max_new_tokens="3"), "is '3'", "at least 1"),
    "an answer that is too long": (lambda w: w.lm.predict(DOCUMENT, max_new_tokens=3000), "is 3000", "at most 9 new"),
    "two targets to verify": (lambda w: w.own.verify(FEW, [0]), "`target` has 2 rows", "select([0])"),
    "no rows to verify": (lambda w: w.own.verify(FEW.select([0]), []), r"`rows` is \[\]", "trak_indices"),
    "a row to exclude": (lambda w: w.own.exclude(5), "`rows` is 5", "`[5]`"),
    "a row beyond the last": (lambda w: w.own.exclude([999]), r"`rows` has \[999\]", "from 0 to 23"),
    "nothing to show": (lambda w: w.new("none").show(0), "There is nothing to show", "`attributor.attribute(eval_d"),
    "titel=": (
        lambda w: _asked(w).report(w.home / "x.html", titel="x"),
        "no argument `titel`",
        "did you mean `title`?",
    ),
    "TorchScript": (lambda w: w.new(model=torch.jit.script(torch.nn.Linear(2, 3))), "is TorchScript", "Make it from"),
    "a target to show": (lambda w: _asked(w).show(99), "`target` is 99", "Give the row"),
    "exampels=": (lambda w: _asked(w).show(0, exampels=3), "no argument `exampels`", "did you mean `examples`?"),
    "int3": (lambda w: w.own.convert(w.home / "c", "int3"), "`feature_dtype` is 'int3'", "'int2'"),
    "a comparison": (lambda w: w.own.fidelity(of="exakt"), "`of` is 'exakt'", "'index'"),
    "no checkpoints to estimate": (lambda w: w.own.estimate(checkpoints=0), "`checkpoints` is 0", "at least 1"),
    "checkpoints to estimate in words": (
        lambda w: w.own.estimate(checkpoints="2"),
        "`checkpoints` is '2'",
        "at least 1",
    ),
    "a fact of an index": (lambda w: w.own.push_to_hub("me/x", ld=0.3), "no argument `ld`", "did you mean `lds`?"),
    "no repo": (lambda w: w.own.push_to_hub(None), "`repo_id` is None", "save_pretrained"),
    "a file as index": (lambda w: TrakAttributor.from_pretrained(str(w.home / "file")), "is a file", "the directory"),
    "None as index": (lambda w: TrakAttributor.from_pretrained(None), "`repo_or_path` is None", "'user/name'. Name"),
    "a directory without an index": (
        lambda w: TrakAttributor.from_pretrained(str(w.home)),
        "holds no index: neither trak_index.json nor trak_config.json",
        "`save_pretrained`",
    ),
    "None to save an index in": (
        lambda w: w.own.save_pretrained(None),
        "`directory` is None",
        "empty directory. Name",
    ),
    "no index": (lambda w: TrakAttributor.from_pretrained(), "without `repo_or_path`", "Pass it"),
    "sav_dir= of TRAKer": (
        lambda w: TRAKer(w.model, "text_classification", 3, sav_dir="x"),
        "no argument `sav_dir`",
        "did you mean `save_dir`?",
    ),
    "one step in place of a list": (lambda w: TrakCallback(steps=3), "`steps` is 3", "step numbers of at least 1"),
}


def _asked(world: Any) -> TrakAttributor:
    world.own.attribute(FEW, 2)
    return world.own


def check(message: str, given: str, remedy: str) -> None:
    """Check that a message says what was given, what was expected and what to do, in three sentences."""
    assert re.search(f"(?s){given}.*Expected", message), message
    assert remedy.replace("\\", "") in message, message
    assert len(SENTENCE_END.findall(message)) < 3, message


@pytest.mark.parametrize("mistake", CALLS)
def test_calls(mistake: str, world: Any) -> None:
    call, given, remedy = CALLS[mistake]
    with pytest.raises(Exception) as caught:
        call(world)
    own = type(caught.value).__module__ == "hf_trak.errors"
    assert own or type(caught.value) in (ValueError, TypeError, FileNotFoundError), repr(caught.value)
    check(str(caught.value), given, remedy)


def test_what_is_right_stays_as_it_is(world: Any) -> None:
    """Errors inside of a call with right arguments are not those of the call."""

    def fails(rows: Any) -> Any:
        raise TypeError("of the collator")

    own = TrakAttributor(world.model, world.config("right"), ROWS, fails)
    with pytest.raises(TypeError, match=r"^of the collator"):
        own.featurize()
    assert TrakConfig(proj_dim=3).to_dict()["proj_dim"] == 3 and Span(words="x") == Span(words="x")


def test_features_that_are_all_zero_are_called_so(world: Any) -> None:
    """No λ helps where no attributed parameter takes part in the output, as after an adapter was merged."""
    unused = tiny_bert()
    unused.register_parameter("merged", torch.nn.Parameter(torch.ones(3)))
    own = world.new("zero", unused, grad_wrt=["merged"], engine="iterative").featurize()
    with pytest.raises(SingularGramError) as caught:
        own.attribute(FEW, method="index")
    check(str(caught.value), "All features of all training rows are 0", "before merging")
    assert "λ" not in str(caught.value)


@pytest.mark.parametrize("projection", ["none", "sjlt"])
def test_models_in_float64(projection: str, world: Any) -> None:
    """Their gradients are summed in float32, as those of the same model in float32."""
    model = tiny_bert()
    found = [
        world.new(f"{projection}-{dtype}", copy.deepcopy(model).to(dtype), proj_type=projection)
        .featurize()
        .features.store.train(0)
        .read(0)
        .grads
        for dtype in (torch.float64, torch.float32)
    ]
    assert torch.allclose(*found, rtol=1e-3, atol=1e-5 * float(found[1].abs().max()))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text classifier in `model`, its rows in `data`, and features of them in `trak`."""
    home = tmp_path_factory.mktemp("files")
    tiny_bert().save_pretrained(home / "model")
    word_tokenizer().save_pretrained(home / "model")
    rows = Dataset.from_dict({"text": ["the fox sleeps", "a dull film"] * 4, "label": [0, 1] * 4})
    DatasetDict(train=rows, test=rows.select([0])).save_to_disk(home / "data")
    rows.save_to_disk(home / "alone")
    rows.remove_columns("label").select([0]).to_json(home / "bare.jsonl")
    rows.rename_columns({"text": "title"}).add_column("body", ["a film"] * 8).to_json(home / "unclear.jsonl")
    (home / "empty.jsonl").write_text("")
    (home / "wrong.yaml").write_text("proj_dimm: 3\n")
    (home / "file").write_text("x")
    assert main(["featurize", *arguments(home)]) == 0
    return home


def arguments(home: Path, **changed: str) -> list[str]:
    given = {"model": home / "model", "train_dataset": home / "data", "output_dir": home / "trak", **changed}
    return [
        "--use_cpu",
        "--proj_dim",
        "32",
        *(part for name, value in given.items() for part in (f"--{name}", str(value))),
    ]


COMMANDS: dict[str, tuple[Callable[[Path], list[str]], str, str]] = {
    "a model that is not there": (
        lambda h: ["featurize", *arguments(h, model="./nomodel")],
        r"'./nomodel'",
        "Correct the path",
    ),
    "rows that are not there": (
        lambda h: ["featurize", *arguments(h, train_dataset="rows.jsonl")],
        r"'rows.jsonl'",
        "Correct the path",
    ),
    "no rows": (lambda h: ["featurize", "--model", str(h / "model")], "--train_dataset missing", "trained on"),
    "a file as output": (
        lambda h: ["featurize", *arguments(h, output_dir=str(h / "file"))],
        "is a file",
        "Name another one",
    ),
    "columns that leave a choice": (
        lambda h: ["featurize", *arguments(h, train_dataset=str(h / "unclear.jsonl"))],
        r"\['title', 'label', 'body'\]",
        "`--text_columns`",
    ),
    "a column of texts": (
        lambda h: ["featurize", *arguments(h, text_columns="txt")],
        r"names \['txt'\]",
        "Correct `--text_columns`",
    ),
    "a column of labels": (
        lambda h: ["featurize", *arguments(h, label_column="stars")],
        r"names \['stars'\]",
        "Correct `--label_column`",
    ),
    "a task": (
        lambda h: ["featurize", *arguments(h, task="text_clasification")],
        "text_clasification",
        "did you mean",
    ),
    "a checkpoint": (
        lambda h: ["featurize", *arguments(h, checkpoints=str(h / "modle"))],
        "modle' does not exist",
        "['model'",
    ),
    "no targets": (
        lambda h: ["attribute", *arguments(h, train_dataset=str(h / "alone"))],
        "No targets",
        "`--eval_dataset`",
    ),
    "targets without labels": (
        lambda h: ["attribute", *arguments(h, eval_dataset=str(h / "bare.jsonl"))],
        r"and not \['label'\]",
        "`--predict`",
    ),
    "a negative number": (lambda h: ["attribute", *arguments(h, top_k="-1")], "`top_k` is -1", "at least 1"),
    "groups": (lambda h: ["attribute", *arguments(h, group_by="sorce")], "`group_by` is 'sorce'", "'text'"),
    "a word of a class": (lambda h: ["attribute", *arguments(h, words="fox")], "`part` is Span", "Leave `part` out"),
    "rows= without reranking": (
        lambda h: ["attribute", *arguments(h, rerank_rows="5")],
        "`rerank_rows` is 5",
        "Set `method`",
    ),
    "a directory without a run": (
        lambda h: ["attribute", "--output_dir", str(h / "data")],
        "holds no run",
        "`hf-trak featurize`",
    ),
    "a key of YAML": (lambda h: ["featurize", "--config", str(h / "wrong.yaml")], "'proj_dimm'", "nearest: proj_dim"),
    "a YAML that is not there": (lambda h: ["featurize", "--config", str(h / "no.yaml")], "not a file", "YAML file"),
}


@pytest.mark.few(11)
@pytest.mark.parametrize("mistake", COMMANDS)
def test_commands(mistake: str, files: Path, capsys: Any) -> None:
    argv, given, remedy = COMMANDS[mistake]
    assert main(argv(files)) == 1
    text = capsys.readouterr().err
    kind, message = re.search(r"hf-trak \w+: error: (\w+): (.*)\n\(Set HF_TRAK_TRACEBACK", text, re.S).groups()  # type: ignore[union-attr]
    assert not hasattr(builtins, kind) or kind in ("ValueError", "TypeError", "FileNotFoundError")
    check(message, given, remedy)


def test_options_that_are_misspelt(capsys: Any) -> None:
    for option, right in (("--topk", "--top_k"), ("--eval_datset", "--eval_dataset"), ("--word", "--words")):
        with pytest.raises(SystemExit):
            main(["attribute", option, "3"])
        assert f"did you mean {right}" in capsys.readouterr().err
    assert main(["atribute"]) == 2 and "did you mean attribute?" in capsys.readouterr().err


def test_a_dataset_may_call_its_numbers_features() -> None:
    """Such as one of torch, whose columns have no types."""
    require_class_numbers(SimpleNamespace(features=torch.ones(3, 2)), FEW, "the targets")
    require_class_numbers(FEW, SimpleNamespace(features=[1.0, 2.0]), "the targets")
