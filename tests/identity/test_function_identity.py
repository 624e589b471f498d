"""Functions and tasks are identified by what they compute and refer to, not by where they stand."""

import functools
import json
import logging
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertConfig
from work import counted_calls

from hf_trak.identity.function_identity import function_identity, identity_of, same_function
from hf_trak.identity.own_code import name_of, stored_attributes
from hf_trak.modelout_functions import TASK_TO_MODELOUT, AbstractModelOutput, BatchedModelOutput, get_task
from hf_trak.modelout_functions.classification import ClassificationModelOutput
from hf_trak.modelout_functions.embedding_pairs import EmbeddingPairsModelOutput
from hf_trak.modelout_functions.function import FunctionModelOutput, task_identity
from hf_trak.modelout_functions.loss import LossModelOutput


def compiled(source: str, name: str = "f", module: str = "a_users_code", file: str = "a.py") -> Any:
    """What a module of this source holds under a name."""
    made = types.ModuleType(module)
    exec(compile(textwrap.dedent(source), file, "exec"), made.__dict__)
    return getattr(made, name)


def code_of(value: Any) -> str:
    return function_identity(value)["code"]


BASE = """
import math, torch, functools
from torch.nn import functional as F
SCALE = 2.0
TABLE = {"a": [1, 2]}
def helper(x, y=1):
    return x * SCALE + y
def f(out, batch, k=3, *, t=1.0):
    "Docstring."
    inner = [helper(v) for v in batch if v > 1]
    def g(z):
        "Of g."
        return z + 1.5
    return g(out) * k * t * TABLE["a"][0] + F.relu(out).sum() + len(inner)
"""

CHANGES = {
    "a constant": ("z + 1.5", "z + 1.6"),
    "the type of a constant": ("v > 1]", "v > 1.0]"),
    "true for one": ("v > 1]", "v > True]"),
    "an operator": ("g(out) * k", "g(out) + k"),
    "a default": ("k=3", "k=4"),
    "the type of a default": ("k=3", "k=3.0"),
    "a keyword default": ("t=1.0", "t=2.0"),
    "the name of an argument": ("k=3, *, t=1.0", "q=3, *, t=1.0"),
    "keyword only": ("k=3, *, t", "k=3, t"),
    "a library function": ("F.relu", "F.gelu"),
    "a builtin": ("len(inner)", "sum(inner)"),
    "a global constant": ("SCALE = 2.0", "SCALE = 3.0"),
    "a value in a global mapping": ("[1, 2]", "[3, 2]"),
    "a function that it calls": ("x * SCALE", "x / SCALE"),
    "a default of a function that it calls": ("y=1", "y=2"),
    "a nested function": ("return z + 1.5", "return -z + 1.5"),
    "a condition": ("v > 1", "v >= 1"),
    "an exception handler": ("    inner =", "    try: pass\n    except ValueError: pass\n    inner ="),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_edits_are_noticed(change: str) -> None:
    old, new = CHANGES[change]
    edited = BASE.replace("k * t", "q * t").replace(old, new) if new.startswith("q=3") else BASE.replace(old, new)
    assert edited != BASE
    first, second = (function_identity(compiled(source)) for source in (BASE, edited))
    assert first["name"] == second["name"] == "a_users_code.f"
    assert first["code"] != second["code"]
    assert same_function(first, second) is False and same_function(first, dict(first)) is True


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def f", "\n\n# A comment.\n\ndef f"),
        ("Docstring.", "Another docstring."),
        ("Of g.", "Another one."),
        ("inner", "renamed"),
        ("def helper", "unused = 3\ndef helper"),
        ("def g(z)", "def renamed(z)"),
        ('"Docstring."\n', '"Docstring."; '),
    ],
)
def test_what_defines_no_behaviour_is_not(old: str, new: str) -> None:
    """Lines, comments, docstrings, local names, and globals that are not used."""
    edited = BASE.replace(old, new)
    if new == "def renamed(z)":
        edited = edited.replace("g(out)", "renamed(out)")
    assert edited != BASE
    assert code_of(compiled(edited)) == code_of(compiled(BASE))
    assert code_of(compiled(BASE, module="other", file="/elsewhere/b.py")) == code_of(compiled(BASE))


def test_documented_inner_classes_have_the_code_of_undocumented_ones() -> None:
    source = """
    def f():

        class Inner:
            'One text.'
            x = 1
        return Inner
    """
    moved = source.replace("One text.", "Another.").replace("def f", "\n\n\ndef f")
    assert code_of(compiled(source)) == code_of(compiled(moved))
    assert code_of(compiled(source)) != code_of(compiled(source.replace("x = 1", "x = 2")))


def test_a_docstring_is_no_constant_but_other_texts_are() -> None:
    sources = ("def f(): return 'a'", "def f(): return 'b'", "f = lambda: 'a'", "f = lambda: 'b'")
    assert len({code_of(compiled(source)) for source in sources}) == 2
    listed = [code_of(compiled(f"def f(x): return ['{text}' for _ in x]")) for text in "ab"]
    assert listed[0] != listed[1]


def test_the_code_of_a_function_does_not_change_by_running_it() -> None:
    """The interpreter specializes bytecode in place, and tracers look into it."""
    function = compiled(BASE)
    before = function_identity(function)
    for i in range(300):
        function(torch.ones(2), [1, 2, i])
    tracer = sys.gettrace()
    sys.settrace(lambda *event: None)
    try:
        function(torch.ones(2), [1])
        assert function_identity(function) == before
    finally:
        sys.settrace(tracer)
    assert function_identity(function) == before


def closing_over(value: Any) -> Any:
    return lambda out, batch: (out, value)


class Weighted:
    def __init__(self, weight: Any, other: Any = None) -> None:
        self.weight = weight
        self._other = other

    def __call__(self, out: Any, batch: Any) -> Any:
        return out * self.weight

    def method(self, out: Any, batch: Any) -> Any:
        return out + self.weight


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        self.a = a


def linear(seed: int, bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2, bias=bias)


def plain(out: Any, batch: Any) -> Any:
    return out


VALUES: list[Any] = [
    *(1, 2, 1.0, True, "1", None, -0.0, 0.0, float("nan"), b"1", [1], [1.0], (1,), {"a": 1}, {"a": 2}, {1: "a"}, {1}),
    *(torch.ones(2), torch.zeros(2), torch.ones(2, 1), torch.ones(2).double(), np.ones(2), np.ones(3), np.float32(1)),
    *(torch.float32, torch.float16, torch.device("cpu"), torch.nn.functional.relu, torch.relu, torch.tanh, len, sum),
    *(np.mean, np.sum, np.exp, np.log, torch.ops.aten.relu, torch.ops.aten.tanh, "a".join, "b".join),
    *(linear(0), linear(1), linear(0, bias=False), torch.nn.Sequential(linear(0)), torch.nn.LayerNorm(2)),
    *(torch.nn.LayerNorm(2, eps=0.1), torch.nn.CrossEntropyLoss(), torch.nn.CrossEntropyLoss(label_smoothing=0.1)),
    *(Weighted(1), Weighted(2), Weighted([1, {"a": Weighted(3)}]), Weighted([1, {"a": Weighted(4)}]), Weighted(1, 2)),
    *(Slotted(1), Slotted(2), plain, closing_over(1), closing_over(2), closing_over(plain), closing_over(Weighted(1))),
    *(
        functools.partial(plain),
        functools.partial(plain, 1),
        functools.partial(plain, 2),
        functools.partial(plain, a=1),
    ),
    *(
        functools.partial(plain, a=2),
        functools.partial(plain, b=1),
        functools.partial(functools.partial(plain, 1), a=1),
    ),
    *(functools.partial(torch.relu), functools.partial(torch.tanh), Weighted(1).method, Weighted(2).method),
    *(torch.no_grad()(plain), functools.cache(plain), Weighted, Slotted, int),
    *(types.SimpleNamespace(a=1), types.SimpleNamespace(a=2), Path("a"), Path("b"), range(3), range(4)),
]


def test_values_in_closures_partials_and_objects_are_compared() -> None:
    digests: dict[str, Any] = {}
    for value in VALUES:
        found = digests.setdefault(code_of(closing_over(value)), value)
        assert found is value, f"{value!r} is taken for {found!r}"
    again: list[Any] = [closing_over(torch.ones(2)), closing_over(linear(0)), closing_over([1]), Weighted(1)]
    once: list[Any] = [closing_over(torch.ones(2)), closing_over(linear(0)), closing_over([1]), Weighted(1)]
    assert [code_of(value) for value in again] == [code_of(value) for value in once]
    assert code_of(closing_over({"a": 1, "b": 2})) == code_of(closing_over({"b": 2, "a": 1}))
    assert code_of(closing_over({"x", "y", "z"})) == code_of(closing_over({"z", "y", "x"}))


def test_names_say_what_is_what() -> None:
    assert function_identity(torch.nn.functional.relu) == {"name": "torch.nn.functional.relu"}
    assert function_identity(torch.relu) == {"name": "torch._VariableFunctionsClass.relu"}
    assert function_identity(len) == {"name": "builtins.len"}
    assert function_identity(np.mean) == {"name": "numpy.mean"}
    assert function_identity(np.exp) == {"name": "numpy.exp"}
    assert function_identity(torch.nn.Linear) == {"name": "torch.nn.modules.linear.Linear"}
    assert function_identity(get_task) == {"name": "hf_trak.modelout_functions.registry.get_task"}
    assert function_identity(str.upper) == {"name": "builtins.str.upper"}
    partial = function_identity(functools.partial(torch.nn.functional.cross_entropy, reduction="none"))
    assert partial["name"] == "functools.partial(torch.nn.functional.cross_entropy)"
    assert set(partial) == {"name", "code"}, "no bytecode, so the version of Python does not matter"
    assert function_identity(Weighted(1).method)["name"] == "test_function_identity.Weighted.method"
    own = function_identity(plain)
    assert own["name"] == "test_function_identity.plain"
    assert own["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert len(own["code"]) == 32


def test_a_method_overridden_or_inherited_counts() -> None:
    source = """
    import torch
    class Base:
        rate = 1.0
        def __call__(self, out, batch): return self.inner(out)
        def inner(self, out): return out * self.rate
        @staticmethod
        def fixed(): return 1
        @property
        def half(self): return 0.5
    class C(Base):
        def __init__(self): self.x = 1
    """
    changes = {
        "inherited": ("out * self.rate", "out + self.rate"),
        "class attribute": ("rate = 1.0", "rate = 2.0"),
        "static": ("return 1\n", "return 2\n"),
        "property": ("return 0.5", "return 0.25"),
        "init": ("self.x = 1", "self.x = 2"),
        "base": ("class C(Base)", "class C(Base, list)"),
    }
    base = compiled(source, "C")
    for name, (old, new) in changes.items():
        other = compiled(source.replace(old, new), "C")
        assert code_of(other) != code_of(base), name
        assert code_of(other()) != code_of(base()), name
    assert code_of(compiled("\n\n" + source, "C")) == code_of(base)


def test_functions_of_other_modules_of_the_user_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`import losses; losses.focal(x)` and a package in a folder of its own, but no further than into libraries."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_losses_of_test.py").write_text("GAMMA = 2\ndef focal(x): return x ** GAMMA\nunused = 1\n")
    import my_losses_of_test  # type: ignore[import-not-found]

    source = "import my_losses_of_test as m, torch\ndef f(x): return m.focal(torch.nn.functional.relu(x))"
    before = code_of(compiled(source))
    my_losses_of_test.unused = 2
    assert code_of(compiled(source)) == before
    my_losses_of_test.GAMMA = 3
    assert code_of(compiled(source)) != before


def test_of_objects_of_libraries_only_what_is_read_counts() -> None:
    """Arguments of a script hold the paths of the run, too."""
    source = """
    from argparse import Namespace
    arguments = Namespace(alpha=1.0, output_dir="a")
    def f(x): return x * arguments.alpha
    """
    before = code_of(compiled(source))
    assert code_of(compiled(source.replace('output_dir="a"', 'output_dir="b"'))) == before
    assert code_of(compiled(source.replace("alpha=1.0", "alpha=2.0"))) != before
    whole = source.replace("arguments.alpha", "g(arguments)").replace("def f", "def g(a): return a.alpha\n    def f")
    assert code_of(compiled(whole)) != code_of(compiled(whole.replace("alpha=1.0", "alpha=2.0")))
    texts = [code_of(compiled(f"TEXT = '{text}'\ndef f(): return TEXT.upper()")) for text in "ab"]
    assert texts[0] != texts[1]
    config = BertConfig(num_labels=2)
    before = code_of(closing_over(config))
    config.problem_type, config._name_or_path = "regression", "elsewhere"
    assert code_of(closing_over(config)) == before
    config.layer_norm_eps = 0.1
    assert code_of(closing_over(config)) != before


def test_a_script_and_remote_code_have_the_names_under_which_they_are_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = types.ModuleType("__main__")
    script.__file__, script.__spec__ = "/somewhere/training.py", None
    monkeypatch.setitem(sys.modules, "__main__", script)
    function = compiled("def f(): pass", module="__main__")
    assert function_identity(function)["name"] == "training.f"
    assert name_of(compiled("class Net: pass", "Net", "__main__")) == "training.Net"
    remote = [f"transformers_modules.user.repo.{revision}.modeling_x" for revision in ("aa", "bb")]
    assert {name_of(compiled("class Net: pass", "Net", module)) for module in remote} == {
        "transformers_modules.modeling_x.Net"
    }


@pytest.mark.slow
def test_circles_end_and_depth_is_bounded() -> None:
    source = """
    def f(n): return g(n - 1) if n else 0
    def g(n): return f(n) + C().h(n)
    class C:
        def h(self, n): return super().__hash__() + f(n) + len([C])
    """
    assert code_of(compiled(source)) == code_of(compiled(source))
    assert code_of(compiled(source)) != code_of(compiled(source.replace("f(n) +", "f(n) -")))
    endless: list[Any] = [1]
    endless += [endless, endless]
    assert code_of(closing_over(endless)) == code_of(closing_over(endless))
    knot = Weighted(1)
    knot.weight = [knot, {"self": knot}]
    assert code_of(knot) == code_of(knot)
    assert len(code_of(closing_over([[i] for i in range(100_000)]))) == 32


@pytest.mark.slow
def test_a_thousand_functions_and_a_long_list_are_quick() -> None:
    source = "\n".join(f"def f{i}(x): return f{i + 1}(x) + {i}" for i in range(1000)) + "\ndef f1000(x): return x"
    function = compiled(source, "f0")
    first, calls = counted_calls(lambda: code_of(function))
    assert calls < 800 * 1000, "474 per function"
    assert first != code_of(compiled(source.replace("return x", "return -x"), "f0")), "the last of the chain"
    long = list(range(1_000_000))
    whole, calls = counted_calls(lambda: code_of(closing_over(long)))
    assert whole != code_of(closing_over(long[:-1]))
    assert calls < 10_000, "not one for every element"


def test_loggers_open_files_and_own_counters_do_not_matter(tmp_path: Path) -> None:
    source = """
    import logging
    logger = logging.getLogger("a.user")
    calls = 0
    def f(x):
        global calls
        calls += 1
        logger.info("%s", __name__)
        return x
    """
    function = compiled(source)
    before = code_of(function)
    function(1)
    logging.getLogger("a.user").setLevel(logging.ERROR)
    assert code_of(function) == before
    with (tmp_path / "a").open("w") as one, (tmp_path / "b").open("w") as two:
        assert code_of(closing_over(one)) == code_of(closing_over(two))


def test_the_attributed_model_is_no_part_of_a_function() -> None:
    """Its weights have an identity of their own; those of any other module are compared."""
    model = torch.nn.Sequential(linear(0), linear(1))
    functions = [closing_over(model), closing_over(model[1]), closing_over(model[0].weight), Weighted(model)]
    before = [function_identity(function, model) for function in functions]
    alone = [function_identity(function) for function in functions]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    assert [function_identity(function, model) for function in functions] == before
    assert all(a["code"] != function_identity(f)["code"] for a, f in zip(alone, functions, strict=True))
    other = linear(0)
    assert function_identity(closing_over(other), model) != function_identity(closing_over(linear(3)), model)


def test_identities_compare_across_versions_of_python() -> None:
    here = {"name": "m.f", "code": "a" * 32, "python": "3.11"}
    assert same_function(here, dict(here)) is True
    assert same_function(here, {**here, "code": "b" * 32}) is False
    assert same_function(here, {**here, "code": "b" * 32, "python": "3.12"}) is None
    assert same_function(here, {**here, "name": "m.g", "code": "b" * 32, "python": "3.12"}) is False
    assert same_function(here, {**here, "name": "m.g"}) is True, "renamed"
    assert same_function(here, {"name": "m.f"}) is False
    assert same_function({"name": "m.f"}, {"name": "m.f"}) is True
    assert same_function({"name": "m.f"}, {"name": "m.g"}) is False
    other = {**here, "code": "b" * 32, "python": "3.12"}
    assert same_function({"a": [1, here]}, {"a": [1, other]}) is None
    assert same_function({"a": [1, here]}, {"a": [2, other]}) is False
    assert same_function({"a": [1, here]}, {"a": [1]}) is False
    assert same_function({"a": 1}, {"b": 1}) is False
    assert same_function(1, True) is False and same_function(1, 1.0) is False and same_function(None, None) is True
    nested = [json.dumps({"class": "x", "settings": {"f": f}}) for f in (here, other, {**here, "name": "n"})]
    assert same_function(nested[0], nested[1]) is None and same_function(nested[0], nested[2]) is True
    assert same_function("{a", "{b") is False
    assert same_function([1, [2]], (1, (2,))) is True, "as JSON keeps it"


def test_private_attributes_of_own_objects_count() -> None:
    """Also those that the class does not assign; of a library's objects, they are often caches."""

    class Own:
        pass

    found = []
    for scale in (1.0, 2.0):
        one = Own()
        one._scale = [scale]  # type: ignore[attr-defined]
        found.append(code_of(one))
    assert found[0] != found[1]


def test_plain_values_are_themselves() -> None:
    for value in (None, True, 3, 0.5, "x"):
        assert identity_of(value) is value
    assert identity_of(float("inf"))["name"] == "builtins.float"
    assert identity_of(float("inf")) != identity_of(float("nan"))
    json.dumps([identity_of(value) for value in VALUES], allow_nan=False)


@pytest.mark.slow
def test_identities_are_the_same_in_a_new_process(tmp_path: Path) -> None:
    """Run from a file and imported, with other hash seeds."""
    (tmp_path / "script_of_test.py").write_text(
        textwrap.dedent(BASE)
        + textwrap.dedent(
            """
            class Task:
                names = {"x", "y", "z"}
                def __init__(self): self.alpha = {"q", "r", 3}
                def __call__(self, x): return x if x in {"a", "b", "c"} else self.names
            if __name__ == "__main__":
                from hf_trak.identity.function_identity import function_identity as identity
                print(*(identity(v)["code"] for v in (f, Task, Task(), functools.partial(f, k=Task()))))
            """
        )
    )
    output = subprocess.run(
        [sys.executable, "script_of_test.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    module = types.ModuleType("script_of_test")
    exec(compile((tmp_path / "script_of_test.py").read_text(), "x.py", "exec"), module.__dict__)
    values = (module.f, module.Task, module.Task(), functools.partial(module.f, k=module.Task()))
    assert output.split() == [code_of(value) for value in values]


# Tasks


def test_library_tasks_keep_the_identity_that_stores_have() -> None:
    """Those without functions are rebuilt from it when an index is loaded."""
    tasks = [kind() for kind in TASK_TO_MODELOUT.values()]
    tasks += [ClassificationModelOutput(temperature=2.0), LossModelOutput(), get_task("clip"), get_task("causal_lm")]
    for task in tasks:
        assert set(task_identity(task)) == {"class", "settings"}
        assert task_identity(task)["class"] == f"{type(task).__module__}.{type(task).__qualname__}"
    assert task_identity(ClassificationModelOutput(temperature=2.0)) == {
        "class": "hf_trak.modelout_functions.classification.ClassificationModelOutput",
        "settings": {"temperature": 2.0},
    }
    pairs = task_identity(EmbeddingPairsModelOutput(directions=("query_to_doc", "doc_to_query")))
    assert pairs["settings"]["directions"] == ["query_to_doc", "doc_to_query"]
    assert task_identity(EmbeddingPairsModelOutput(**pairs["settings"])) == pairs
    inner = LossModelOutput(of=ClassificationModelOutput(temperature=2.0))
    assert json.loads(task_identity(inner)["settings"]["of"])["settings"] == {"temperature": 2.0}


def output_a(out: Any, batch: Any) -> Tensor:
    return out.logits[:, 0]


def test_functions_of_a_task_are_compared_by_their_code() -> None:
    lambdas = [lambda out, batch: out.logits[:, 0], lambda out, batch: out.logits[:, 1]]
    pairs = [
        (lambdas[0], lambdas[1]),
        (closing_over(1), closing_over(2)),
        (functools.partial(output_a, batch=1), functools.partial(output_a, batch=2)),
        (Weighted(1), Weighted(2)),
        (Weighted(1).method, Weighted(2).method),
        (compiled(BASE), compiled(BASE.replace("1.5", "1.25"))),
    ]
    for first, second in pairs:
        saved, given = (task_identity(FunctionModelOutput(function)) for function in (first, second))
        assert same_function(saved, given) is False
        assert same_function(saved, json.loads(json.dumps(task_identity(FunctionModelOutput(first))))) is True
    others = task_identity(FunctionModelOutput(output_a, out_to_loss_fn=output_a))
    assert same_function(task_identity(FunctionModelOutput(output_a)), others) is False


class OwnTask(BatchedModelOutput):
    """With settings of many kinds, a private one, and state that batches leave behind."""

    scale = 1.0

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.weights = settings.get("weights", [1.0, 2.0])
        self.table = settings.get("table", {"a": 1})
        self.tensor = settings.get("tensor", torch.ones(2))
        self.inner = settings.get("inner", ClassificationModelOutput())
        self.function = settings.get("function", output_a)
        self._alpha = settings.get("alpha", 0.5)
        self.model: Any = None
        self.seen = 0
        self._count = 0

    def bind(self, model: torch.nn.Module) -> None:
        self.model = model

    def set_scale(self, value: float) -> None:
        self.scale = value

    def model_inputs(self, batch: Any) -> Any:
        self._count += 1
        return (), dict(batch)

    def output(self, model_output: Any, batch: Any, side: Any = "train") -> Tensor:
        self._look(batch)
        return model_output.logits[:, 0] * self._alpha

    def _look(self, batch: Any) -> None:
        self.seen = len(batch)
        self._cache = batch

    def out_to_loss_grad(self, model_output: Any, batch: Any, side: Any = "train") -> Tensor:
        return torch.ones(2)


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": [1.0, 3.0]},
        {"weights": [1.0]},
        {"table": {"a": 2}},
        {"table": {"a": [output_a]}},
        {"tensor": torch.zeros(2)},
        {"inner": ClassificationModelOutput(temperature=3.0)},
        {"inner": FunctionModelOutput(output_a)},
        {"function": plain},
        {"alpha": 0.25},
    ],
)
def test_settings_of_a_users_task_are_compared(changed: dict[str, Any]) -> None:
    first, second = task_identity(OwnTask()), task_identity(OwnTask(**changed))
    assert same_function(first, second) is False
    assert same_function(first, json.loads(json.dumps(task_identity(OwnTask())))) is True


def test_state_of_a_users_task_is_no_setting() -> None:
    """What it keeps of the model and of batches is left out; what is set on it between them is not."""
    task = OwnTask()
    before = task_identity(task)
    assert set(before["settings"]) == {"weights", "table", "tensor", "inner", "function", "_alpha"}
    task.bind(linear(0))
    task.model_inputs({"x": torch.ones(2)})
    task.output(types.SimpleNamespace(logits=torch.ones(2, 2)), {"x": 1})
    assert task_identity(task) == before
    task.set_scale(2.0)
    assert same_function(task_identity(task), before) is False


def test_the_code_of_a_users_task_is_compared() -> None:
    source = """
    from hf_trak.modelout_functions.classification import ClassificationModelOutput
    class Task(ClassificationModelOutput):
        def output(self, model_output, batch, side="train"):
            return super().output(model_output, batch, side) * 1.0
    """
    first, second = (compiled(text, "Task")() for text in (source, source.replace("* 1.0", "* 2.0")))
    assert same_function(task_identity(first), task_identity(second)) is False
    assert task_identity(first)["code"]["name"] == "a_users_code.Task"
    moved = compiled("\n\n" + source, "Task")()
    assert same_function(task_identity(first), task_identity(moved)) is True
    loss = [LossModelOutput(of=with_loss(task)) for task in (first, second, first)]
    identities = [task_identity(task) for task in loss]
    assert same_function(identities[0], identities[1]) is False and same_function(identities[0], identities[2]) is True


def with_loss(task: AbstractModelOutput) -> Any:
    assert hasattr(task, "per_sample_loss")
    return task


class Logs:
    """Collects what it logs in every way that people write; the last three attributes are settings."""

    def loss(self, name: str, value: float) -> float:
        self.last = value
        self.seen.append(value)
        self.parts["loss"] = value
        self.parts_of[name]["loss"] = value
        self.stored[name].append(value)
        self.nested[name][0].append(value)
        del self.removed[name]
        self.counted[name] += 1
        return value * self.scale * self.scales[name] * sum(self.factors["all"])


def test_what_a_method_changes_is_its_state() -> None:
    changed = {"last", "seen", "parts", "parts_of", "stored", "nested", "removed", "counted"}
    assert stored_attributes(Logs.loss.__code__) == changed
