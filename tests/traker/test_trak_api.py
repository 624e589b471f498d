"""Every public name of the `trak` API exists, with the documented arguments in the documented order."""

import importlib
import inspect
from typing import Any

import pytest

REQUIRED = inspect.Parameter.empty

# module, qualified name, documented arguments without `self`; a default is given where the reference gives one
FUNCTIONS: list[tuple[str, str, list[Any]]] = [
    (
        "traker",
        "TRAKer",
        [
            "model",
            "task",
            "train_set_size",
            ("save_dir", "./trak_results"),
            ("load_from_save_dir", True),
            ("device", "cuda"),
            "gradient_computer=FunctionalGradientComputer",
            ("projector", None),
            ("saver", None),
            ("score_computer", None),
            ("proj_dim", 2048),
            ("logging_level", 20),
            ("use_half_precision", True),
            ("proj_max_batch_size", 32),
            ("projector_seed", 0),
            ("grad_wrt", None),
            ("lambda_reg", 0.0),
        ],
    ),
    ("traker", "TRAKer.featurize", ["batch", ("inds", None), ("num_samples", None)]),
    ("traker", "TRAKer.finalize_features", [("model_ids", None), ("del_grads", False)]),
    ("traker", "TRAKer.finalize_scores", ["exp_name", ("model_ids", None), ("allow_skip", False)]),
    ("traker", "TRAKer.init_projector", ["projector", "proj_dim", "proj_max_batch_size"]),
    (
        "traker",
        "TRAKer.load_checkpoint",
        ["checkpoint", "model_id", ("_allow_featurizing_already_registered", False)],
    ),
    ("traker", "TRAKer.score", ["batch", ("inds", None), ("num_samples", None)]),
    ("traker", "TRAKer.start_scoring_checkpoint", ["exp_name", "checkpoint", "model_id", "num_targets"]),
    (
        "gradient_computers",
        "AbstractGradientComputer",
        ["model", "task", ("grad_dim", None), "dtype", ("device", "cuda")],
    ),
    ("gradient_computers", "AbstractGradientComputer.compute_loss_grad", ["batch"]),
    ("gradient_computers", "AbstractGradientComputer.compute_per_sample_grad", ["batch"]),
    ("gradient_computers", "AbstractGradientComputer.load_model_params", ["model"]),
    (
        "gradient_computers",
        "FunctionalGradientComputer",
        ["model", "task", "grad_dim", "dtype", "device", ("grad_wrt", None)],
    ),
    ("gradient_computers", "FunctionalGradientComputer.compute_loss_grad", ["batch"]),
    ("gradient_computers", "FunctionalGradientComputer.compute_per_sample_grad", ["batch"]),
    ("gradient_computers", "FunctionalGradientComputer.load_model_params", ["model"]),
    (
        "gradient_computers",
        "IterativeGradientComputer",
        ["model", "task", "grad_dim", "dtype", "device", ("grad_wrt", None)],
    ),
    ("gradient_computers", "IterativeGradientComputer.compute_loss_grad", ["batch"]),
    ("gradient_computers", "IterativeGradientComputer.compute_per_sample_grad", ["batch"]),
    ("gradient_computers", "IterativeGradientComputer.load_model_params", ["model"]),
    ("modelout_functions", "AbstractModelOutput", []),
    ("modelout_functions", "AbstractModelOutput.get_output", ["model", "weights", "buffers"]),
    ("modelout_functions", "AbstractModelOutput.get_out_to_loss_grad", ["model", "weights", "buffers", "batch"]),
    ("modelout_functions", "CLIPModelOutput", [("temperature", None), ("simulated_batch_size", 300)]),
    (
        "modelout_functions",
        "CLIPModelOutput.get_embeddings",
        [
            "model",
            "loader",
            "batch_size",
            "embedding_dim",
            ("size", 50_000),
            ("preprocess_fn_img", None),
            ("preprocess_fn_txt", None),
        ],
    ),
    ("modelout_functions", "CLIPModelOutput.get_out_to_loss_grad", ["model", "weights", "buffers", "batch"]),
    ("modelout_functions", "CLIPModelOutput.get_output", ["model", "weights", "buffers", "image", "label"]),
    ("modelout_functions", "ImageClassificationModelOutput", [("temperature", 1.0)]),
    (
        "modelout_functions",
        "ImageClassificationModelOutput.get_out_to_loss_grad",
        ["model", "weights", "buffers", "batch"],
    ),
    (
        "modelout_functions",
        "ImageClassificationModelOutput.get_output",
        ["model", "weights", "buffers", "image", "label"],
    ),
    ("modelout_functions", "IterativeImageClassificationModelOutput", [("temperature", 1.0)]),
    (
        "modelout_functions",
        "IterativeImageClassificationModelOutput.get_out_to_loss_grad",
        ["model", "weights", "buffers", "batch"],
    ),
    (
        "modelout_functions",
        "IterativeImageClassificationModelOutput.get_output",
        ["model", "weights", "buffers", "images", "labels"],
    ),
    ("modelout_functions", "TextClassificationModelOutput", [("temperature", 1.0)]),
    (
        "modelout_functions",
        "TextClassificationModelOutput.get_out_to_loss_grad",
        ["model", "weights", "buffers", "batch"],
    ),
    (
        "modelout_functions",
        "TextClassificationModelOutput.get_output",
        ["model", "weights", "buffers", "input_id", "token_type_id", "attention_mask", "label"],
    ),
    ("projectors", "AbstractProjector", ["grad_dim", "proj_dim", "seed", "proj_type", "device"]),
    ("projectors", "AbstractProjector.free_memory", []),
    ("projectors", "AbstractProjector.project", ["grads", "model_id"]),
    (
        "projectors",
        "BasicProjector",
        [
            "grad_dim",
            "proj_dim",
            "seed",
            "proj_type",
            "device",
            ("block_size", 100),
            "dtype",
            ("model_id", 0),
            "*args",
            "**kwargs",
        ],
    ),
    ("projectors", "BasicProjector.free_memory", []),
    ("projectors", "BasicProjector.generate_sketch_matrix", ["generator_state"]),
    ("projectors", "BasicProjector.get_generator_states", []),
    ("projectors", "BasicProjector.project", ["grads", "model_id"]),
    (
        "projectors",
        "BasicSingleBlockProjector",
        ["grad_dim", "proj_dim", "seed", "proj_type", "device", "dtype", ("model_id", 0), "*args", "**kwargs"],
    ),
    ("projectors", "BasicSingleBlockProjector.free_memory", []),
    ("projectors", "BasicSingleBlockProjector.generate_sketch_matrix", []),
    ("projectors", "BasicSingleBlockProjector.project", ["grads", "model_id"]),
    (
        "projectors",
        "ChunkedCudaProjector",
        ["projector_per_chunk", "max_chunk_size", "params_per_chunk", "feat_bs", "device", "dtype"],
    ),
    ("projectors", "ChunkedCudaProjector.allocate_input", []),
    ("projectors", "ChunkedCudaProjector.free_memory", []),
    ("projectors", "ChunkedCudaProjector.project", ["grads", "model_id"]),
    (
        "projectors",
        "CudaProjector",
        ["grad_dim", "proj_dim", "seed", "proj_type", "device", "max_batch_size", "*args", "**kwargs"],
    ),
    ("projectors", "CudaProjector.free_memory", []),
    ("projectors", "CudaProjector.project", ["grads", "model_id"]),
    (
        "projectors",
        "NoOpProjector",
        [
            ("grad_dim", 0),
            ("proj_dim", 0),
            ("seed", 0),
            ("proj_type", "na"),
            ("device", "cuda"),
            "*args",
            "**kwargs",
        ],
    ),
    ("projectors", "NoOpProjector.free_memory", []),
    ("projectors", "NoOpProjector.project", ["grads", "model_id"]),
    (
        "savers",
        "AbstractSaver",
        ["save_dir", "metadata", "load_from_save_dir", "logging_level", "use_half_precision"],
    ),
    ("savers", "AbstractSaver.del_grads", ["model_id", "target"]),
    ("savers", "AbstractSaver.init_store", ["model_id"]),
    ("savers", "AbstractSaver.load_current_store", ["model_id"]),
    ("savers", "AbstractSaver.register_model_id", ["model_id"]),
    ("savers", "AbstractSaver.save_scores", ["exp_name"]),
    ("savers", "AbstractSaver.serialize_current_model_id_metadata", []),
    *(
        entry
        for saver in ("MmapSaver",)
        for entry in (
            (
                "savers",
                saver,
                [
                    "save_dir",
                    "metadata",
                    "train_set_size",
                    "proj_dim",
                    "load_from_save_dir",
                    "logging_level",
                    "use_half_precision",
                ],
            ),
            ("savers", f"{saver}.del_grads", ["model_id"]),
            ("savers", f"{saver}.init_experiment", ["exp_name", "num_targets", "model_id"]),
            ("savers", f"{saver}.init_store", ["model_id"]),
            (
                "savers",
                f"{saver}.load_current_store",
                ["model_id", ("exp_name", None), ("exp_num_targets", -1)],
            ),
            ("savers", f"{saver}.register_model_id", ["model_id", "_allow_featurizing_already_registered"]),
            ("savers", f"{saver}.save_scores", ["exp_name"]),
            ("savers", f"{saver}.serialize_current_model_id_metadata", [("already_exists", True)]),
        )
    ),
    ("savers", "AbstractSaver.init_experiment", ["exp_name", "num_targets", "model_id"]),
    (
        "savers",
        "MmapSaver.load_current_store",
        ["model_id", ("exp_name", None), ("exp_num_targets", -1), ("mode", "r+")],
    ),
    ("score_computers", "AbstractScoreComputer", ["dtype", "device"]),
    (
        "score_computers",
        "BasicScoreComputer",
        ["dtype", "device", ("CUDA_MAX_DIM_SIZE", 20_000), ("logging_level", 20), ("lambda_reg", 0.0)],
    ),
    ("score_computers", "BasicSingleBlockScoreComputer", ["dtype", "device"]),
    *(
        ("score_computers", f"{computer}.{method}", arguments)
        for computer in ("AbstractScoreComputer", "BasicScoreComputer", "BasicSingleBlockScoreComputer")
        for method, arguments in (
            ("get_scores", ["features", "target_grads", "accumulator"]),
            ("get_x_xtx_inv", ["grads", "xtx"]),
            ("get_xtx", ["grads"]),
        )
    ),
    ("utils", "get_free_memory", ["device"]),
    (
        "utils",
        "get_matrix_mult",
        ["features", "target_grads", ("target_dtype", None), ("batch_size", 8096), ("use_blockwise", False)],
    ),
    ("utils", "get_matrix_mult_blockwise", ["features", "target_grads", "target_dtype", "bs"]),
    ("utils", "get_matrix_mult_standard", ["features", "target_grads", "target_dtype"]),
    ("utils", "get_num_params", ["model"]),
    ("utils", "get_output_memory", ["features", "target_grads", "target_dtype"]),
    ("utils", "get_parameter_chunk_sizes", ["model", "batch_size"]),
    ("utils", "is_not_buffer", ["ind", "params_dict"]),
    ("utils", "parameters_to_vector", ["parameters"]),
    ("utils", "test_install", [("use_fast_jl", True)]),
    ("utils", "vectorize", ["g", ("arr", None), ("device", "cuda")]),
]


def find(module: str, name: str) -> Any:
    found = importlib.import_module(f"hf_trak.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("module, name, arguments", FUNCTIONS, ids=[f"{m}.{n}" for m, n, _ in FUNCTIONS])
def test_name_exists_with_its_arguments(module, name, arguments):
    function = find(module, name)
    target = function.__init__ if isinstance(function, type) else function
    parameters = [p for p in inspect.signature(target).parameters.values() if p.name not in ("self", "holder", "cls")]
    for position, argument in enumerate(arguments):
        expected, default = argument if isinstance(argument, tuple) else (argument, REQUIRED)
        if expected == "gradient_computer=FunctionalGradientComputer":
            expected, default = "gradient_computer", find("gradient_computers", "FunctionalGradientComputer")
        if expected == "*args":
            assert any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        elif expected == "**kwargs":
            assert any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        else:
            named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]
            assert [p.name for p in named][position] == expected
            if default is not REQUIRED:
                assert named[position].default == default
    # what the reference does not list must not be needed
    known = {a[0] if isinstance(a, tuple) else a.split("=")[0] for a in arguments}
    for parameter in parameters:
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            assert parameter.name in known or parameter.default is not REQUIRED


def test_task_names():
    tasks = find("modelout_functions", "TASK_TO_MODELOUT")
    assert {"image_classification", "iterative_image_classification", "text_classification", "clip"} <= set(tasks)


def test_the_exception_of_the_savers():
    assert issubclass(find("savers", "ModelIDException"), Exception)


def test_projection_types():
    kinds = find("projectors", "ProjectionType")
    assert issubclass(kinds, str)
    assert {kind.name: kind.value for kind in kinds} == {"normal": "normal", "rademacher": "rademacher"}


def test_class_attributes_of_clip():
    clip = find("modelout_functions", "CLIPModelOutput")
    assert clip.image_embeddings is None and clip.text_embeddings is None
    assert clip.num_computed_embeddings == 0 and clip.sim_batch_size == 0


@pytest.mark.parametrize(
    "module, base, children",
    [
        (
            "gradient_computers",
            "AbstractGradientComputer",
            ["FunctionalGradientComputer", "IterativeGradientComputer"],
        ),
        (
            "modelout_functions",
            "AbstractModelOutput",
            [
                "CLIPModelOutput",
                "ImageClassificationModelOutput",
                "IterativeImageClassificationModelOutput",
                "TextClassificationModelOutput",
            ],
        ),
        (
            "projectors",
            "AbstractProjector",
            ["NoOpProjector", "BasicProjector", "BasicSingleBlockProjector", "CudaProjector"],
        ),
        ("savers", "AbstractSaver", ["MmapSaver"]),
        ("score_computers", "AbstractScoreComputer", ["BasicScoreComputer", "BasicSingleBlockScoreComputer"]),
    ],
)
def test_base_classes_are_abstract(module, base, children):
    parent = find(module, base)
    assert inspect.isabstract(parent)
    for child in children:
        assert issubclass(find(module, child), parent)


def test_the_package_root_exports_the_entry_points():
    import hf_trak

    assert hf_trak.TRAKer is find("traker", "TRAKer")
    assert hf_trak.__version__
