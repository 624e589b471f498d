"""A model in training mode, as `trainer.train()` leaves it, is asked as in evaluation mode, and left as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digit_models import DigitNet, digits, make, trained_net
from safetensors.torch import save_file
from torch import nn

from hf_trak import Exact, Rerank, TrakAttributor
from hf_trak.errors import ConfigMismatchError
from hf_trak.report import training_report

ROWS, TARGETS = digits(0, 40), digits(1000, 1006)

QUESTIONS: dict[str, Callable[[TrakAttributor, Path], Any]] = {
    "index": lambda own, _: own.attribute(TARGETS, top_k=None, method="index")["trak_scores"][:],
    "exact": lambda own, _: own.attribute(TARGETS, top_k=None, method="exact")["trak_scores"][:],
    "hybrid": lambda own, _: own.attribute(TARGETS, top_k=None, method=Exact("hybrid"))["trak_scores"][:],
    "refined": lambda own, _: own.attribute(TARGETS, top_k=3, method=Rerank(5, refine="cg"))["trak_scores"][:],
    "predict": lambda own, _: own.predict(TARGETS)["labels"][:],
    "show": lambda own, _: (own.attribute(TARGETS, top_k=2, method="index"), str(own.show(0)))[1],
    "report": lambda own, place: (
        own.attribute(TARGETS, top_k=2, method="index"),
        own.report(place / "page.html").read_text("utf-8").count("predicted"),
    )[1],
    "training_report": lambda own, place: training_report(own.features, TARGETS, place / "training.html").losses,
    "verify": lambda own, _: own.verify(TARGETS.select([0]), [1, 2], draws=4).change,
    "review": lambda own, _: own.review(TARGETS)["effect"][:],
    "self_influence": lambda own, _: own.self_influence("exact").tolist(),
    "fidelity": lambda own, _: own.fidelity(rows=4, targets=2).scores.mean_spearman,
    "recommend": lambda own, _: str(own.recommend(TARGETS)).count("\n"),
    "estimate": lambda own, _: own.estimate().disk_bytes,
}


def noisy_net() -> DigitNet:
    """Batches of another mode would change its outputs, and its buffers."""
    torch.manual_seed(3)
    net = DigitNet()
    net.body = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16, momentum=0.9), nn.Tanh(), nn.Dropout(0.7)
    )
    net.head = nn.Linear(16, 10)
    return net


def ask(place: Path, name: str, training: bool) -> tuple[Any, dict[str, torch.Tensor], list[bool]]:
    net = noisy_net().train(training)
    own = make(net, place, ROWS, curvature="ekfac").featurize()
    found = QUESTIONS[name](own, place)
    return found, net.state_dict(), [module.training for module in net.modules()]


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_mode_of_a_model_is_not_asked(tmp_path: Path, name: str) -> None:
    before = noisy_net().state_dict()
    expected, _, _ = ask(tmp_path / "evaluated", name, training=False)
    found, state, modes = ask(tmp_path / "trained", name, training=True)
    assert all(modes)
    assert all(torch.equal(state[key], before[key]) for key in before)
    if isinstance(expected, str):
        assert found == expected
    else:
        assert np.allclose(np.asarray(found, float), np.asarray(expected, float), rtol=1e-5, atol=1e-9)


def test_a_report_names_the_checkpoints_that_were_asked(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("one_before", "one_after")]
    for place, steps in zip(places, (5, 9), strict=True):
        place.mkdir()
        save_file(trained_net(ROWS, steps).state_dict(), place / "model.safetensors")
    own = make(trained_net(ROWS), tmp_path / "trak", ROWS).featurize(list(map(str, places)))
    own.attribute(TARGETS, top_k=2, method="index", checkpoints=[1])
    page = own.report(tmp_path / "page.html").read_text("utf-8")
    assert "one_after" in page and "one_before" not in page


def test_checkpoints_in_one_autocast_region_have_their_own_weights(tmp_path: Path) -> None:
    """Autocast keeps the weights that it has rounded until the region ends."""
    nets = [trained_net(ROWS, seed=seed) for seed in (0, 1)]
    checkpoints = [net.state_dict() for net in nets]
    exact = make(nets[0], tmp_path / "float32", ROWS).featurize(checkpoints)
    rounded = make(nets[0], tmp_path / "bfloat16", ROWS)

    def scores(own: TrakAttributor, number: int) -> np.ndarray:
        return np.array(own.attribute(TARGETS, top_k=None, method="index", checkpoints=[number])["trak_scores"][:])

    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded.featurize(checkpoints)
        found = [scores(rounded, number) for number in (0, 1)]
    for number in (0, 1):
        expected = scores(exact, number)
        assert np.abs(found[number] - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("engine", ["auto", "functional", "iterative"])
def test_gradients_in_inference_mode_are_refused_and_nothing_is_kept(tmp_path: Path, engine: str) -> None:
    """Torch records none there, so that all would be zero."""
    own = make(noisy_net().eval(), tmp_path, ROWS, engine=engine)
    with torch.inference_mode():
        for ask in (own.featurize, lambda: own.attribute(TARGETS, 3, method="exact")):
            with pytest.raises(ValueError, match=r"within `torch.inference_mode\(\)`, where torch records none"):
                ask()
    scored = own.featurize().attribute(TARGETS, top_k=3, method="exact")
    assert np.abs(scored["trak_scores"][:]).min() > 0


def test_the_random_state_of_a_training_is_left_alone(tmp_path: Path) -> None:
    own, before = make(noisy_net(), tmp_path, ROWS), torch.get_rng_state()
    own.featurize().attribute(TARGETS, top_k=3, method="exact")
    own.predict(TARGETS)
    own.verify(TARGETS.select([0]), [1, 2], draws=4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", ["index", "exact", Exact("hybrid")])
def test_frozen_parameters_stay_attributed_and_others_are_refused(tmp_path: Path, method: Any) -> None:
    """Such as those of another adapter, or of a layer that a training releases."""
    net = trained_net(ROWS)
    net.head.bias.requires_grad_(False)
    own = make(net, tmp_path / "trak", ROWS).featurize()
    expected = make(net, tmp_path / "scratch", ROWS).featurize().attribute(TARGETS, top_k=None, method=method)
    own.attribute(TARGETS.select([5]), top_k=None, method=method)  # with a curvature, if there is one
    net.requires_grad_(False)
    found = own.attribute(TARGETS, top_k=None, method=method)
    assert np.allclose(found["trak_scores"][:], expected["trak_scores"][:], rtol=1e-5, atol=1e-9)
    net.head.bias.requires_grad_(True)
    with pytest.raises(ConfigMismatchError, match=r"'head.bias' is trained now, and was frozen .* `grad_wrt`"):
        own.attribute(digits(1010, 1012), top_k=None, method=method)
