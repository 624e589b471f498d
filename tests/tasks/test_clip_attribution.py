"""CLIP through `TrakAttributor`: from columns of images and captions to scores, on any number of processes."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from datasets import Dataset, Features, Image, Value
from PIL import Image as PILImage
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from store_jobs import start_group
from trak_options import trak_config
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_trak import ImageTextCollator, TrakAttributor, TrakConfig
from hf_trak.errors import CheckpointMismatchError, StoreError
from hf_trak.gradient_computers import make_gradient_computer
from hf_trak.modelout_functions import CLIPModelOutput, get_task, infer_task
from hf_trak.modelout_functions.clip import draw_rows

NEGATIVES = 6
SIDE = 32
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def pairs(start: int, stop: int) -> Dataset:
    """Digits of scikit-learn, with captions in words."""
    data = load_digits()
    images = [PILImage.fromarray((image * 15).astype(np.uint8)) for image in data.images[start:stop]]
    captions = [f"a {WORDS[label]}" for label in data.target[start:stop]]
    features = Features({"picture": Image(), "caption": Value("string"), "number": Value("int64")})
    rows = {"picture": images, "caption": captions, "number": list(range(start, stop))}
    return Dataset.from_dict(rows, features=features)


def to_pixels(image: PILImage.Image) -> torch.Tensor:
    pixels = np.asarray(image.resize((SIDE, SIDE), PILImage.Resampling.BILINEAR), dtype=np.float32)
    return torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1)


def to_tokens(texts: list[str]) -> torch.Tensor:
    """One token per word, the highest at the end, as CLIP wants it."""
    known = ["a", *WORDS]
    rows = [[1 + known.index(word) for word in text.split()] for text in texts]
    return torch.tensor([[*row, *[15] * (5 - len(row))] for row in rows])


class TinyProcessor:
    """What a processor of `transformers` is to the collator."""

    image_processor = tokenizer = True

    def __init__(self, mask: bool) -> None:
        self.mask = mask

    def __call__(self, images: list[PILImage.Image], text: list[str], **options: Any) -> dict[str, torch.Tensor]:
        assert options["truncation"] and options["return_tensors"] == "pt"
        tokens = to_tokens(text)
        batch = {"pixel_values": torch.stack([to_pixels(image) for image in images]), "input_ids": tokens}
        return {**batch, "attention_mask": torch.ones_like(tokens)} if self.mask else batch


def collator(model: torch.nn.Module) -> ImageTextCollator:
    if hasattr(model, "config"):
        return ImageTextCollator("picture", "caption", processor=TinyProcessor(isinstance(model, CLIPModel)))
    return ImageTextCollator("picture", "caption", image_transform=to_pixels, tokenizer=to_tokens)


TEXT = {"context_length": 5, "vocab_size": 16, "width": 16, "heads": 2, "layers": 1}
VIT = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 16, "image_size": SIDE}
RN50 = {"layers": [1, 1, 1, 1], "width": 4, "head_width": 64, "patch_size": None, "image_size": SIDE}
HF = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
HF_TEXT = {**HF, "vocab_size": 16, "max_position_embeddings": 5, "eos_token_id": 15}
HF_VISION = {**HF, "image_size": SIDE, "patch_size": 16}


def from_named_config(tmp_path: Path) -> torch.nn.Module:
    content = {"embed_dim": 8, "vision_cfg": VIT, "text_cfg": TEXT}
    (tmp_path / "hf-trak-tiny.json").write_text(json.dumps(content))
    open_clip.add_model_config(tmp_path)
    return open_clip.create_model("hf-trak-tiny")


MODELS: dict[str, Callable[[Path], torch.nn.Module]] = {
    "open_clip ViT": lambda _: open_clip.CLIP(8, VIT, TEXT, output_dict=True),
    "open_clip named": from_named_config,
    "open_clip RN50": lambda _: open_clip.CLIP(8, RN50, TEXT),
    "open_clip CustomTextCLIP": lambda _: open_clip.CustomTextCLIP(8, VIT, TEXT),
    "open_clip with a bias": lambda _: open_clip.CLIP(8, VIT, TEXT, init_logit_bias=-2.0),
    "CLIPModel": lambda _: CLIPModel(CLIPConfig(text_config=HF_TEXT, vision_config=HF_VISION, projection_dim=8)),
    "SiglipModel": lambda _: SiglipModel(
        SiglipConfig(text_config={**HF_TEXT, "projection_size": 16}, vision_config=HF_VISION)
    ),
}
SIGMOID = {"open_clip with a bias", "SiglipModel"}


def make_model(name: str, tmp_path: Path, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name](tmp_path).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        model.logit_scale.fill_(1.5)
        if name in SIGMOID:
            model.logit_bias.fill_(-1.0)
    return model


def make(model: torch.nn.Module, directory: Path, train: Any, task: Any = None, **options: Any) -> TrakAttributor:
    settings = {"proj_dim": 128, "shard_size": 8, "use_cpu": True, **options}
    config = trak_config(output_dir=str(directory), **settings)
    if task is None:
        kind = type(get_task(infer_task(model)))
        task = kind(simulated_batch_size=NEGATIVES)
    return TrakAttributor(model, config, train_dataset=train, data_collator=collator(model), task=task)


def stored(attributor: TrakAttributor, model_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    shards = list(attributor.features.store.train(model_id))
    return torch.cat([s.grads for s in shards]), torch.cat([s.out_to_loss for s in shards])


def relative_error(given: torch.Tensor, expected: torch.Tensor) -> float:
    return float((given.double() - expected.double()).abs().max() / expected.double().abs().max())


pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


@pytest.fixture(params=list(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


# -- features --------------------------------------------------------------------------------------------------------


def towers(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalized embeddings in float64, with gradients, by calling the towers one by one."""
    if hasattr(model, "config"):
        image: BaseModelOutputWithPooling = model.get_image_features(batch["pixel_values"].double())
        text = model.get_text_features(batch["input_ids"])
        found = (image.pooler_output, text.pooler_output)
    else:
        found = (model.encode_image(batch["image"].double()), model.encode_text(batch["text"]))
    return tuple(tower / tower.norm(dim=-1, keepdim=True) for tower in found)


def definition(name: str, model: torch.nn.Module, train: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of f and values of q, from the definitions, in float64, by autograd."""
    exact = copy.deepcopy(model).double()
    batch = collator(model)(list(train))
    with torch.no_grad():
        chosen = draw_rows(len(train), NEGATIVES, 0)
        phi_b, psi_b = (tower[chosen] for tower in towers(exact, batch))
    phi, psi = towers(exact, batch)
    s, b = np.exp(1.5), -1.0
    pair = (phi * psi).sum(1)
    if name in SIGMOID:
        wrong = torch.log1p(torch.exp(s * phi @ psi_b.T + b)) + torch.log1p(torch.exp(s * psi @ phi_b.T + b))
        loss = torch.log1p(torch.exp(-(s * pair + b))) + wrong.sum(1) / 2
        p = torch.exp(-loss)
        f, q = torch.log(p / (1 - p)), 1 - p
    else:
        f = -torch.logsumexp(-(pair[:, None] - phi @ psi_b.T), 1) - torch.logsumexp(
            -(pair[:, None] - psi @ phi_b.T), 1
        )
        right = torch.exp(s * pair)
        p = [right / (right + torch.exp(s * a @ c.T).sum(1)) for a, c in ((phi, psi_b), (psi, phi_b))]
        q = 1 - (p[0] + p[1]) / 2
    rows = []
    for value in f:
        gradients = torch.autograd.grad(value, list(exact.parameters()), retain_graph=True, allow_unused=True)
        parts = zip(exact.parameters(), gradients, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in parts]))
    return torch.stack(rows), q.detach()


@pytest.mark.few(2)
def test_features_are_those_of_the_definition_alone_and_in_any_batch(name: str, tmp_path: Path) -> None:
    """Neither batch size nor company changes a pair's features; q of a batch of one is not 0."""
    model, train = make_model(name, tmp_path), pairs(0, 11)
    assert infer_task(model) == ("siglip" if name in SIGMOID else "clip")
    grads, q = definition(name, model, train)
    for batch_size in (1, 5):
        attributor = make(model, tmp_path / str(batch_size), train, per_device_batch_size=batch_size).featurize()
        found = stored(attributor)
        projector = attributor.features.projector()
        assert relative_error(found[0], projector.project(grads.float(), 0) * projector.scale) < 2e-5
        assert relative_error(found[1], q) < 2e-5
        assert float(found[1].min()) > 0.05


@pytest.mark.few(2)
def test_features_do_not_depend_on_the_order_in_a_batch(name: str, tmp_path: Path) -> None:
    model, train = make_model(name, tmp_path), pairs(0, 8)
    attributor = make(model, tmp_path / "trak", train).featurize()
    grads, q = stored(attributor)
    order = torch.tensor([3, 7, 0, 5, 1, 6, 2, 4])
    projector = attributor.features.projector()
    sink = projector.sink(8, 0, torch.device("cpu"))
    batch = collator(model)([train[int(i)] for i in order])
    outputs = make_gradient_computer("auto", model, attributor.task).stream(batch, sink, "train")
    assert relative_error(sink.result() * projector.scale, grads[order]) < 1e-5
    assert relative_error(outputs.out_to_loss, q[order]) < 1e-5


@pytest.mark.slow
def test_a_named_model_of_full_size(tmp_path: Path) -> None:
    """The smallest vision transformer that open_clip names, with its own transform and tokenizer."""
    model, _, preprocess = open_clip.create_model_and_transforms("ViT-S-32-alt")
    model.eval()
    collate = ImageTextCollator(
        "picture", "caption", image_transform=preprocess, tokenizer=open_clip.get_tokenizer("ViT-S-32-alt")
    )
    results = []
    for batch_size in (1, 2):
        config = TrakConfig(
            output_dir=str(tmp_path / str(batch_size)), proj_dim=32, per_device_batch_size=batch_size, use_cpu=True,
            grad_wrt=["visual.proj", "text_projection"],
        )  # fmt: skip
        attributor = TrakAttributor(model, config, pairs(0, 3), collate, task=CLIPModelOutput(simulated_batch_size=2))
        results.append(stored(attributor.featurize()))
    assert relative_error(results[0][0], results[1][0]) < 1e-4
    assert relative_error(results[0][1], results[1][1]) < 1e-4


# -- negatives -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_negatives_are_embedded_once_per_checkpoint_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [make_model("open_clip ViT", tmp_path, seed) for seed in (0, 1)]
    calls = []
    prepare = CLIPModelOutput.prepare
    monkeypatch.setattr(CLIPModelOutput, "prepare", lambda *args: (calls.append(1), prepare(*args)))
    attributor = make(copy.deepcopy(models[0]), tmp_path / "trak", pairs(0, 12)).featurize(models)
    assert len(calls) == 2
    kept = [load_file(tmp_path / "trak" / f"checkpoint-{i}" / "references.safetensors") for i in (0, 1)]
    for model, tensors in zip(models, kept, strict=True):
        chosen = draw_rows(12, NEGATIVES, 0)
        batch = collator(model)([pairs(0, 12)[row] for row in chosen])
        with torch.no_grad():
            expected = model.encode_image(batch["image"], normalize=True)
        torch.testing.assert_close(tensors["image_embeddings"], expected, rtol=1e-4, atol=1e-5)
    scores = np.asarray(attributor.attribute(pairs(20, 23), top_k=None)["trak_scores"][:])

    again = make(copy.deepcopy(models[0]), tmp_path / "trak", pairs(0, 12))
    later = again.attribute(pairs(20, 23), top_k=None, name="later", checkpoints=models)
    assert len(calls) == 2
    np.testing.assert_array_equal(np.asarray(later["trak_scores"][:]), scores)


@pytest.mark.slow
def test_references_of_other_weights_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    """Targets are compared with the simulated negatives of their own checkpoint, whole, or not at all."""
    models = [make_model("open_clip ViT", tmp_path, seed) for seed in (0, 1)]
    attributor = make(copy.deepcopy(models[0]), tmp_path / "trak", pairs(0, 12)).featurize(models)
    paths = [tmp_path / "trak" / f"checkpoint-{i}" / "references.safetensors" for i in (0, 1)]
    with pytest.raises(CheckpointMismatchError):
        attributor.attribute(pairs(20, 22), name="a", checkpoints=models[::-1])
    whole = paths[0].read_bytes()
    paths[0].write_bytes(paths[1].read_bytes())
    with pytest.raises(StoreError, match="belongs to another run"):
        attributor.attribute(pairs(20, 22), name="b")
    paths[0].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StoreError, match="checksum"):
        attributor.attribute(pairs(20, 22), name="c")
    paths[0].write_bytes(whole)
    attributor.attribute(pairs(20, 22), name="d")


def test_the_seed_of_the_run_draws_the_negatives(tmp_path: Path) -> None:
    model = make_model("open_clip ViT", tmp_path)
    drawn = []
    for seed, own in ((0, None), (5, None), (5, 0)):
        task = CLIPModelOutput(simulated_batch_size=NEGATIVES, seed=own)
        make(model, tmp_path / "trak", pairs(0, 40), task=task, seed=seed)
        drawn.append(list(task.reference_rows(40)))
    assert drawn[0] == draw_rows(40, NEGATIVES, 0) and drawn[1] == draw_rows(40, NEGATIVES, 5)
    assert drawn[2] == drawn[0] != drawn[1]


def test_more_negatives_than_training_rows_are_refused(tmp_path: Path) -> None:
    attributor = make(make_model("open_clip ViT", tmp_path), tmp_path / "trak", pairs(0, 12), task="clip")
    with pytest.raises(ValueError, match=r"`simulated_batch_size` is 300, but there are only 12 pair"):
        attributor.featurize()


# -- processes -------------------------------------------------------------------------------------------------------


def draw_in_two(directory: Path) -> int:
    """What each of two processes does; how many there are."""
    attributor = make(make_model("open_clip ViT", directory), directory / "two", pairs(0, 20), shard_size=4)
    attributor.featurize().attribute(pairs(20, 29), top_k=3, name="e")
    return attributor.features.processes.num_processes


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("jobs_with_one_thread")
def test_two_processes_draw_the_same_negatives_and_write_the_bytes_of_one(tmp_path: Path) -> None:
    model = make_model("open_clip ViT", tmp_path)
    one = make(model, tmp_path / "one", pairs(0, 20), shard_size=4)
    one.featurize().attribute(pairs(20, 29), top_k=3, name="e")
    jobs = start_group(tmp_path, 2, draw_in_two, tmp_path, timeout=120)
    assert [job.wait(300) for job in jobs] == [{"value": 2}] * 2
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.safetensors"))
    assert len(files) == 5 + 1 + 1 + 3  # train shards, Gram matrix, references, target shards
    for file in files:
        assert (tmp_path / "two" / file).read_bytes() == (tmp_path / "one" / file).read_bytes(), file
