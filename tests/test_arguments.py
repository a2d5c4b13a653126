"""Natural mistakes in arguments: each error states the mistake and a valid spelling."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Backend,
    Callback,
    Checkpoint,
    Composite,
    ContextParallel,
    DataParallel,
    Debugging,
    Evaluation,
    ExpertParallel,
    Faults,
    Offload,
    Pipeline,
    Precision,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.errors import MeshShapeError, OptimizerError, RuleError
from nnx_parallel.layers import Experts, MoE
from nnx_parallel.loggers import ConsoleLogger
from nnx_parallel.optimizers import muon
from nnx_parallel.sharding import PathNames, PathRules, PolicyRules


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(4, 4, rngs=rngs)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(4)(x)


def loss(model: Any, batch: Any) -> Any:
    return (model.layer(batch) ** 2).mean()


def whole(message: str) -> str:
    """A pattern that matches a full message: mistake, rule and valid value."""
    return f"^{re.escape(message)}$"


MODEL: Any = Net
SGD = optax.sgd(0.1)
IS = "It must be "
LINEN = (
    f"which is from Flax Linen. {IS}an NNX module: nnx.bridge.ToNNX(model, "
    "rngs=rngs).lazy_init(x) converts it, and "
    "https://flax.readthedocs.io/en/latest/guides/linen_to_nnx.html says how to port "
    "it."
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"strategy": FSDP},
            f"strategy is the class FSDP. {IS}a Strategy, such as FSDP() or "
            "Composite(FSDP(), ...). Call the class: FSDP(...).",
        ),
        (
            {"strategy": "fsdp"},
            f"strategy is 'fsdp'. {IS}a Strategy, such as FSDP() or Composite(FSDP(), "
            "...).",
        ),
        (
            {"strategy": [FSDP()]},
            f"strategy is a list. {IS}a Strategy, such as FSDP() or Composite(FSDP(), "
            "...).",
        ),
        (
            {"backend": Backend},
            f"backend is the class Backend. {IS}a Backend, such as "
            "Backend(mesh=FSDP().make_mesh()). Call the class: Backend(...).",
        ),
        (
            {"faults": "skip"},
            f"faults is 'skip'. {IS}a Faults, such as Faults(step_timeout=600).",
        ),
        (
            {"debugging": True},
            f"debugging is True. {IS}a Debugging, such as "
            "Debugging(fast_dev_run=True).",
        ),
        (
            {"evaluation": loss},
            f"evaluation is a function. {IS}an Evaluation, such as "
            "Evaluation(params='ema').",
        ),
        (
            {"precision": "bfloat16"},
            f"precision is 'bfloat16'. {IS}a Precision, such as "
            "Precision.mixed_bfloat16().",
        ),
        (
            {"precision": jnp.bfloat16},
            f"precision is the class bfloat16. {IS}a Precision, such as "
            "Precision.mixed_bfloat16().",
        ),
        ({"checkpoint": 5}, f"checkpoint is 5. {IS}a directory, or a Checkpoint."),
        (
            {"devices": 8},
            f"devices is 8. {IS}a list, even for a single device, such as "
            "jax.devices()[:8].",
        ),
        ({"devices": [0, 1]}, f"devices[0] is 0. {IS}a device."),
        (
            {"loggers": "tensorboard"},
            f"loggers is 'tensorboard'. {IS}a list, even for a single Logger, such as "
            "[ConsoleLogger()]; () for none.",
        ),
        (
            {"names": {"up": ("embed", "mlp")}},
            f"names is a dict. {IS}'auto' (with sample=batch), or a PathNames, such as "
            r"TRANSFORMER_NAMES, or pairs of a regex and the names of the dims: "
            r"PathNames((r'up\.kernel', ('embed', 'mlp'))).",
        ),
        (
            {"loggers": ConsoleLogger()},
            f"loggers is a ConsoleLogger. {IS}a list, even for a single Logger, such "
            "as [ConsoleLogger()]; () for none.",
        ),
        (
            {"loggers": [ConsoleLogger]},
            f"loggers[0] is the class ConsoleLogger. {IS}a Logger. Call the class: "
            "ConsoleLogger(...).",
        ),
        (
            {"callbacks": Callback()},
            f"callbacks is a Callback. {IS}a list, even for a single Callback, such as "
            "[SaveSamples()].",
        ),
        (
            {"callbacks": [print]},
            f"callbacks[0] is a builtin_function_or_method. {IS}a Callback.",
        ),
        (
            {"callbacks": [Callback]},
            f"callbacks[0] is the class Callback. {IS}a Callback. Call the class: "
            "Callback(...).",
        ),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_wrong_argument_types_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=whole(message)):
        Trainer(MODEL, SGD, loss, **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"compiler_options": "xla_a=true"},
            f"compiler_options is 'xla_a=true'. {IS}a dict of XLA's options, such as "
            "{'xla_tpu_scoped_vmem_limit_kib': 65536}, where None removes an "
            "option that the library sets.",
        ),
        (
            {"mesh": "data"},
            f"mesh is 'data'. {IS}a jax.sharding.Mesh, such as FSDP().make_mesh().",
        ),
        (
            {"offload": Offload},
            f"offload is the class Offload. {IS}an Offload, such as Offload() for the "
            "optimizer's state. Call the class: Offload(...).",
        ),
    ],
)
def test_wrong_backend_types_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=whole(message)):
        Backend(**options)


def test_evaluation_loss_of_wrong_type_raises() -> None:
    message = (
        f"Evaluation.loss is 'mse'. {IS}a function loss(model, batch), like the "
        "Trainer's loss."
    )
    with pytest.raises(TypeError, match=whole(message)):
        Evaluation(loss="mse")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"--xla_a": True},
            "compiler_options has the name '--xla_a'. It must be the name of an option "
            "of XLA, without dashes and without its value: 'xla_a'.",
        ),
        (
            {"xla_a=true": None},
            "compiler_options has the name 'xla_a=true'. It must be the name of an "
            "option of XLA, without dashes and without its value: 'xla_a'.",
        ),
        (
            {7: True},
            "compiler_options has the name 7. It must be the name of an option of XLA, "
            "without dashes and without its value.",
        ),
        (
            {"xla_a": ["true"]},
            "compiler_options['xla_a'] is a list. It must be a bool, a number or a "
            "string, or None, which leaves the option out.",
        ),
    ],
)
def test_invalid_compiler_options_raise(options: dict[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=whole(message)):
        Trainer(MODEL, SGD, loss, backend=Backend(compiler_options=options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (MODEL, loss, SGD),
            "loss is an Optax transformation and optimizer a function: they are "
            "swapped. The order is Trainer(model, optimizer, loss).",
        ),
        (
            (MODEL, optax.adamw, loss),
            "optimizer is the function optax.adamw. Call it, with a learning rate: "
            "optax.adamw(3e-4).",
        ),
        (
            (MODEL, muon, loss),
            "optimizer is the function muon. Call it, with a learning rate: lambda "
            "model: muon(0.02, "
            "muon_weight_dimension_numbers=muon_dimension_numbers(model)).",
        ),
        (
            (MODEL, 1e-3, loss),
            "optimizer is of type float. Pass an Optax transformation such as "
            "optax.adamw(3e-4), optax.MultiSteps(...), or a function of the abstract "
            "model that returns one.",
        ),
        (
            (MODEL, optax.cosine_decay_schedule, loss),
            "optimizer is optax.cosine_decay_schedule, which makes a schedule. Pass "
            "the schedule that it returns to an optimizer, as the learning rate: "
            "optax.adamw(schedule).",
        ),
        (
            (MODEL, nnx.Optimizer(Net(nnx.Rngs(0)), SGD, wrt=nnx.Param), loss),
            "optimizer is an nnx.Optimizer. The Trainer keeps the optimizer's state "
            "itself: pass the Optax transformation that it was made from.",
        ),
        (
            (MODEL, SGD, "mse"),
            f"loss is 'mse'. {IS}a function loss(model, batch), which returns a scalar "
            "or a Mean.",
        ),
        ((LinenNet(), SGD, loss), f"model is a LinenNet, {LINEN}"),
        ((LinenNet, SGD, loss), f"model is the class LinenNet, {LINEN}"),
        (
            ({"w": 1}, SGD, loss),
            f"model is a dict. {IS}an nnx.Module, or a function of random keys that "
            "builds one: lambda rngs: Net(rngs=rngs).",
        ),
    ],
    ids=[
        "exchanged",
        "adamw",
        "muon",
        "rate",
        "schedule",
        "nnx",
        "name",
        "linen",
        "linen class",
        "dict",
    ],
)
def test_invalid_model_or_loss_raises(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=whole(message)):
        Trainer(*arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "max_steps",
            "Trainer.fit has no argument 'max_steps'. Did you mean num_steps=?",
        ),
        *(
            (name, f"Trainer.fit has no argument {name!r}. Did you mean num_epochs=?")
            for name in ("epochs", "max_epochs", "num_train_epochs")
        ),
        *(
            (name, f"Trainer.fit has no argument {name!r}. Did you mean eval_data=?")
            for name in ("val_data", "evaldata")
        ),
        ("zebra", "Trainer.fit has no argument 'zebra'. See help(Trainer.fit)."),
    ],
)
def test_unknown_fit_argument_suggests_name(name: str, message: str) -> None:
    fit: Callable = Trainer(MODEL, SGD, loss, loggers=()).fit
    with pytest.raises(TypeError, match=whole(message)):
        fit([], **{name: 3})


def test_unknown_trainer_argument_suggests_name() -> None:
    make: Any = Trainer
    message = (
        "Trainer has no argument 'gradient_accumulation_steps'. Did you mean "
        "num_microbatches=?"
    )
    with pytest.raises(TypeError, match=whole(message)):
        make(MODEL, SGD, loss, gradient_accumulation_steps=4)
    message = "Trainer has no argument 'strategi'. Did you mean strategy=?"
    with pytest.raises(TypeError, match=whole(message)):
        make(MODEL, SGD, loss, strategi=FSDP())


@pytest.mark.parametrize(
    ("name", "group", "option"),
    [
        ("eval_loss", "evaluation", "Evaluation(loss=...)"),
        ("eval_params", "evaluation", "Evaluation(params=...)"),
        *(
            (name, group.__name__.lower(), f"{group.__name__}({name}=...)")
            for group in (Faults, Debugging, Backend)
            for name in inspect.signature(group).parameters
        ),
    ],
)
def test_grouped_argument_names_its_class(name: str, group: str, option: str) -> None:
    make: Any = Trainer
    message = (
        f"Trainer has no argument {name!r}. It is {option}: pass {group}={option}."
    )
    with pytest.raises(TypeError, match=whole(message)):
        make(MODEL, None, None, **{name: None})  # before all other checks


ZERO = "ZeRO-3 is 'params', ZeRO-2 'gradients', ZeRO-1 'optimizer'."
MEANT = "Did you mean {}=?"
OPTIONS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a stage of ZeRO": (FSDP, {"stage": 3}, f"{MEANT.format('shard')} {ZERO}"),
    "a limit of PyTorch": (FSDP, {"min_num_params": 1}, MEANT.format("min_size")),
    "Orbax's limit": (Checkpoint, {"max_to_keep": 2}, MEANT.format("keep_last")),
    "Flax's limit": (Checkpoint, {"keep": 2}, MEANT.format("keep_last")),
    "what Lightning watches": (
        Checkpoint,
        {"monitor": "loss"},
        MEANT.format("keep_best"),
    ),
    "a letter less": (TensorParallel, {"overlp": "ring"}, MEANT.format("overlap")),
    "stages": (Pipeline, {"num_stages": 2}, MEANT.format("size")),
    "another's option": (ContextParallel, {"sequence": True}, "TensorParallel has: {}"),
    "the Trainer's": (Pipeline, {"num_microbatches": 4}, "Trainer has: {}"),
    "devices": (DataParallel, {"devices": 4}, "Trainer has: {}"),
    "a mesh for several": (Composite, {"mesh": None}, "Backend has: {}"),
    "a dtype": (Precision, {"dtype": "bf16"}, MEANT.format("compute")),
    "Mixtral's choices": (Experts, {"num_experts_per_tok": 2}, MEANT.format("top_k")),
    "DeepSeek's experts": (
        Experts,
        {"n_routed_experts": 8},
        MEANT.format("num_experts"),
    ),
    "a count of shared experts": (
        Experts,
        {"n_shared_experts": 1},
        f"{MEANT.format('shared_dim')} It is the total width of all shared experts.",
    ),
    "a mixture's experts": (MoE, {"num_experts": 8}, "Experts has: {}"),
    "a mixture's choices": (MoE, {"top_k": 2}, "Experts has: {}"),
    "a size of the axis": (
        ExpertParallel,
        {"num_experts": 8},
        "Experts has: {}",
    ),
    "nothing like it": (FSDP, {"zebra": 1}, "See help(FSDP)."),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_unknown_option_suggests_name(name: str) -> None:
    options, given, remedy = OPTIONS[name]
    (keyword,) = given
    remedy = remedy.format(f"{keyword}=.")
    message = f"{options.__name__} has no argument {keyword!r}. {remedy}"
    with pytest.raises(TypeError, match=whole(message)):
        options(**given)


def test_misplaced_argument_names_its_owners() -> None:
    make: Any = Trainer
    message = (
        "Trainer has no argument 'shard'. FSDP has: shard=. "
        "ZeRO-3 is 'params', ZeRO-2 'gradients', ZeRO-1 'optimizer'."
    )
    with pytest.raises(TypeError, match=whole(message)):
        make(MODEL, SGD, loss, shard="params")
    pattern = r"^Trainer has no argument 'size'\. .*\bFSDP\b.* have: size=\.$"
    with pytest.raises(TypeError, match=pattern):
        make(MODEL, SGD, loss, size=2)


def test_too_many_positional_options_raise() -> None:
    options: Any
    for options, given in ((MoE, (16, None, 3)), (DataParallel, (1, (), 3))):
        with pytest.raises(TypeError, match="3 positional arguments but 4 were given"):
            options(*given)
    for options in (Offload, Experts):
        with pytest.raises(TypeError, match="1 positional argument but 2 were given"):
            options(8)


@pytest.mark.parametrize("parts", [([FSDP(), TensorParallel(2)],), (FSDP,), ("fsdp",)])
def test_invalid_composite_parts_raise(parts: tuple[Any, ...]) -> None:
    name = getattr(parts[0], "__name__", type(parts[0]).__name__)
    message = (
        f"Composite({name}): each argument must be a strategy, as in "
        "Composite(TensorParallel(2), FSDP()), not a list or a class."
    )
    with pytest.raises(TypeError, match=whole(message)):
        Composite(*parts)


@pytest.mark.parametrize("size", ["4", 4.0, 0, -1, True, [2]])
@pytest.mark.parametrize(
    ("strategy", "axis"),
    [
        (DataParallel, "data"),
        (FSDP, "fsdp"),
        (TensorParallel, "tensor"),
        (ExpertParallel, "expert"),
    ],
)
def test_invalid_axis_sizes_raise(strategy: Callable, axis: str, size: Any) -> None:
    message = (
        f"Mesh axis {axis!r} has size {size!r}. A size is an integer of at least 1; "
        "leave it out to take the devices that remain."
    )
    with pytest.raises(MeshShapeError, match=whole(message)):
        strategy(size).make_mesh()


@pytest.mark.parametrize("size", ["4", 4.0, 0, None])
def test_invalid_stage_count_raises(size: Any) -> None:
    message = (
        f"Pipeline({size!r}): the number of stages is an integer of at least 1, such "
        "as Pipeline(4)."
    )
    with pytest.raises(ValueError, match=whole(message)):
        Pipeline(size)


RULES = (
    "A rule is an instance of PathRules, PolicyRules, LogicalRules, FSDPRules, or of a "
    "class with a method match(info, mesh). Give several rules in a tuple."
)
PAIRS = (
    "Its arguments are pairs of a regex and a PartitionSpec: PathRules((r'up.*kernel', "
    "P(None, 'tensor')), ...)."
)
REGEX = (
    "which Python's re refuses: missing ), unterminated subpattern at position 0. It is"
    r" searched in dotted paths, such as r'mlp\.up\.kernel'; re.escape(text) makes a "
    "regex that matches the text literally."
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FSDP(rules=PathRules(("up", P("fsdp")))),  # pyright: ignore[reportArgumentType]
            "got PathRules(pairs=(('up', P('fsdp',)),), strict=None), a PathRules. "
            f"{RULES}",
        ),
        (
            lambda: FSDP(rules={"up": P("fsdp")}),  # pyright: ignore[reportArgumentType]
            f"got {{'up': P('fsdp',)}}, a dict. {RULES}",
        ),
        (
            lambda: FSDP(rules=(PathRules({"up": P("fsdp")}),)),  # pyright: ignore[reportArgumentType]
            f"PathRules got {{'up': P('fsdp',)}}. {PAIRS}",
        ),
        (
            lambda: FSDP(rules=(PathRules(("up", "fsdp")),)),  # pyright: ignore[reportArgumentType]
            f"PathRules got ('up', 'fsdp'). {PAIRS}",
        ),
        (
            lambda: FSDP(rules=(PathRules(("(up", P("fsdp"))),)),
            f"PathRules got '(up' for a regex, {REGEX}",
        ),
        (
            lambda: FSDP(rules=(PolicyRules(lambda info: "fsdp"),)),  # pyright: ignore[reportArgumentType]
            "A policy returns a jax.sharding.PartitionSpec, such as P('fsdp', None), or"
            " None to pass; match returns such a spec and the reason for it, or None.",
        ),
    ],
    ids=["alone", "dict", "dict of paths", "string", "regex", "policy"],
)
def test_invalid_rules_raise(make: Callable[[], Strategy], message: str) -> None:
    with pytest.raises(RuleError, match=re.escape(message)):
        Trainer(MODEL, SGD, loss, strategy=make())


def test_invalid_path_names_raise() -> None:
    message = (
        "PathNames got 'embed' for 'up'. Give a tuple with one entry for each dim: "
        "None, or a name that occurs once, as in ('embed', None, 'mlp')."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        PathNames(("up", "embed"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuleError, match=re.escape(f"'(up' for a regex, {REGEX}")):
        PathNames(("(up", ("embed",)))


def test_line_search_optimizer_raises() -> None:
    rule = (
        "An optimizer gets the gradients. It also gets value= (the loss) and grad= if "
        "it accepts these arguments. A sharded step cannot compute the loss again "
        "within an update (value_fn=, grad_fn=), as line searches do. Use the "
        "optimizer without a line search, such as optax.lbfgs(1e-2, linesearch=None)."
    )
    found = "^The optimizer needs arguments that a step cannot give: "
    found += ".*missing 1 required .*"
    with pytest.raises(OptimizerError, match=found + re.escape(rule)):
        Trainer(MODEL, optax.lbfgs(), loss).fit([jnp.ones((8, 4))], num_steps=1)


def test_import_from_wrong_module_names_right_one() -> None:
    message = "Stack is in nnx_parallel.layers: from nnx_parallel.layers import Stack."
    with pytest.raises(ImportError, match=whole(message)):
        exec("from nnx_parallel import Stack")
    with pytest.raises(ImportError, match="cannot import name 'Zebra'"):
        exec("from nnx_parallel import Zebra")
