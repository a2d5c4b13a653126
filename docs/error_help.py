"""Each named error: its cause, its fix, and an example."""

from __future__ import annotations

from typing import NamedTuple

from nnx_parallel import errors


class Help(NamedTuple):
    """The part of an error's entry on the site below the class's docstring.

    Attributes:
        cause: The usual mistake.
        fix: The remedy.
        example: A shortened message, or a link to a page that shows a whole message.
    """

    cause: str
    fix: str
    example: str


HELP = {
    "PlanError": Help(
        "`plan` was given a topology, a `fix` or a script that it cannot use.",
        "Follow the message: it lists the valid names, or the action of the script that it "
        "refused before `Trainer.fit`. [Plan](plan.md) shows the forms.",
        "topology='v5q:4x4x4': no hardware is called 'v5q'. Did you mean 'v5p'? ...",
    ),
    "VersionError": Help(
        "`import nnx_parallel` found a jax or flax that is older than the tested versions; or "
        "a model passes specs to a newer jax, which interprets specs differently.",
        "Install the versions in the message.",
        "Found jax 0.9.2. ... pip install 'jax>=0.10,<0.13'",
    ),
    "DeviceMemoryError": Help(
        "A step needs more memory than a device has. The compiler or the first run of the "
        "step reports it.",
        "Use one of the lines at the end of the message: they fit by the formulas of "
        "`plan`. [Plan](plan.md#out-of-memory) shows which strategies fit before you "
        "run.",
        "Out of device memory: RESOURCE_EXHAUSTED ... Changes that fit by the same formulas, the "
        "fastest first: Trainer(..., strategy=FSDP(), remat='dots') ...",
    ),
    "DeviceCountError": Help(
        "`simulate_devices` was called after JAX had counted its devices.",
        "Call it right after the imports, before any array exists. In a notebook, "
        "restart the kernel first.",
        "[Devices were counted before they were simulated]"
        "(pitfalls.md#devices-were-counted-before-they-were-simulated)",
    ),
    "MeshShapeError": Help(
        "The sizes of a strategy do not multiply to the number of devices.",
        "Leave one size out: its axis takes the remaining devices. Or pass "
        "`devices=jax.devices()[:6]`.",
        "Mesh fsdp=? * tensor=3 cannot cover 8 devices ... Valid products of the known "
        "sizes: [1, 2, 4, 8].",
    ),
    "MeshAxisTypeError": Help(
        "The mesh comes from the body of a `shard_map`; or a model calls "
        "`jax.sharding.explicit_axes`.",
        "Pass the mesh from outside of the `shard_map`; call the function without "
        "`explicit_axes`.",
        "The model makes the mesh axes ['fsdp'] Explicit. The axes of a Trainer's mesh "
        "stay Auto ...",
    ),
    "UnknownAxisError": Help(
        "A model or a rule names a dim or a mesh axis that does not exist, often by "
        "a typing error.",
        "Use one of the names in the message, or map yours with `LogicalRules`.",
        "Cannot shard `blocks.layer.mlp.down.bias` as P('columns',): the mesh has no axis "
        "'columns' ...",
    ),
    "IndivisibleDimError": Help(
        "A rule or a name shards a dim into unequal parts; or a strategy splits a sequence "
        "that must stay whole.",
        "Pad the dim, choose another axis size, or paste the rule of the message. With "
        "linear attention, remove `ContextParallel`.",
        "Cannot shard `blocks.layer.attention.key.bias` ... mesh axis 'tensor' of size 2 "
        "does not divide dim 1 of size 3. Pad the dim to 4, ...",
    ),
    "SpecRankError": Help(
        "A `PartitionSpec`, or a tuple of names, has more entries than the array has "
        "dims. A rule by path often matches a bias as well as its kernel.",
        "Shorten it, or make the regex end in `kernel`.",
        "Cannot shard `mlp.bias` ...: the spec has 2 entries for 1 dims. Shorten it.",
    ),
    "CollectiveProductError": Help(
        "A collective matmul got arrays whose dims do not fit, or a dim to shard that "
        "the matmul contracts.",
        "Choose one of the dims in the message.",
        "dim=1 is invalid for x ..., whose dims [1] are contracted. Choose a dim that "
        "is not contracted ...",
    ),
    "AttentionKernelError": Help(
        "`implementation=` asks for a fused kernel that cannot compute this attention.",
        "Leave `implementation=None`: the kernel is then used where it fits.",
        "implementation='cudnn' cannot compute this attention: ...",
    ),
    "PlacementConflictError": Help(
        "Two parts of a `Composite` use the same mesh axis, or two rules disagree about "
        "one dim.",
        "Keep one part and give it the product of the sizes; or make the rules agree.",
        "Both FSDP(size=4) and FSDP(size=2) use the mesh axis 'fsdp' ...",
    ),
    "PlacementTreeError": Help(
        "`in_shardings` or `out_shardings` has a structure that the arguments do not "
        "have.",
        "Pass one value for all, a tuple with one for each argument, or a mapping by "
        "name.",
        "in_shardings has 3 entries for the arguments ['params', 'x']. Give one for "
        "each ...",
    ),
    "RuleError": Help(
        "A value that is not a rule was passed as a rule: a dict, a spec, a single pair.",
        "Pass rules in a tuple: `rules=(PathRules((r'kernel', P('fsdp'))),)`.",
        "PathRules got 'kernel'. Its arguments are pairs of a regex and a PartitionSpec "
        "...",
    ),
    "DonatedArrayError": Help(
        "An array was used after it had been donated to a step, which reuses its memory.",
        "Use the arrays that the step returns; copy arrays that you need later with "
        "`jnp.copy`.",
        "`params['up']`, of shape (64, 256), is gone: it was donated to an earlier call "
        "...",
    ),
    "UnmatchedRuleError": Help(
        "With `PathRules(..., strict=True)`, no regex matches some parameter, or a regex "
        "matches nothing.",
        "Add a rule, or end with `(r'.*', P())` to replicate the rest.",
        "No path rule matches `head.kernel` with shape (64, 10). Strict rules must "
        "match every parameter ...",
    ),
    "ModelError": Help(
        "A weight of the model is a plain array. It would be neither trained nor saved.",
        "Wrap it: `nnx.Param(x)` if it is trained, `nnx.Variable(x)` if not.",
        "[A weight outside of any Variable](pitfalls.md#a-weight-outside-of-any-variable)",
    ),
    "StackError": Help(
        "The blocks of a `Stack` differ, or share a Variable.",
        "Make the blocks alike (`period=` for layers that alternate), and keep shared "
        "Variables outside of the stack.",
        "A block of the stack holds Variables from outside the block: ['table'] ...",
    ),
    "ProgramTextError": Help(
        "`audit` got a program compiled for TPUs, and jaxlib cannot print it: it is "
        "older than libtpu.",
        "Update jax. Or let the compiler write the text: "
        "`compile(compiler_options={'xla_dump_to': DIRECTORY})`, then pass `audit` the "
        "text of the file whose name ends in `after_optimizations.txt`.",
        "jaxlib 0.10.2 cannot print this program: its compiler is newer (INTERNAL: ...",
    ),
    "EightBitError": Help(
        "`layers=` matches no layer of the model, or a layer whose products cannot run in 8 bits: a "
        "layer with `batch_axis` or another `dot_general`, an `nnx.Einsum` that is not a product, or a "
        "layer that the loss does not call. With `mxfp8`, the inputs and outputs of a layer, or the "
        "shards of experts, are not multiples of 32 elements. With `rounding='stochastic'`, `layers=` "
        "selects only experts, or the strategy has a `Pipeline`.",
        "Take `layers=` from the paths in the message; `None` selects the layers inside of a "
        "`Stack`. Pass `sequence=True` instead of `overlap=` to `TensorParallel`.",
        "layers='mlpp' selects no layer of GPT for 8-bit products. ...",
    ),
    "ExpertsError": Help(
        "A mixture of experts has values of a wrong type, more choices than experts, "
        "groups that leave a token too few experts, or a capacity of 0. Or the size of an "
        "`ExpertParallel` does not divide the experts, its model has no experts, or it "
        "sends rows (`exchange='ragged'`) on CPUs.",
        "Take one of the values in the message: a size of `ExpertParallel` that divides "
        "the experts, `exchange=None`; `DataParallel` or `FSDP` for a model without "
        "experts.",
        "`blocks.layer.mlp` has 8 experts, which expert=3 devices cannot share "
        "evenly. ...",
    ),
    "WeightsError": Help(
        "Files of weights are damaged, or their names or shapes differ from the model's.",
        "Fetch the files again; compare `config.json` with the model; complete the "
        "table of names, or pass `ignored=`.",
        "The files have no array 'model.norm.weight', which is needed for ...",
    ),
    "StateStructureError": Help(
        "A loss created a Variable or changed a shape; or values were assigned to a "
        "model of an earlier step.",
        "Create all Variables in `__init__`; ask for `trainer.model` again after each "
        "step.",
        "The loss changed the model's structure: ... A model keeps the names and shapes "
        "of its Variables from step to step ...",
    ),
    "LossError": Help(
        "The loss returns an array, `None` or another value that is not a scalar; or the "
        "weight of its `Mean` depends on the model's parameters.",
        "Reduce it: `.mean()`, or `Mean(total, weight)` with a weight that counts data. "
        "Pass a weight from a `jax.custom_vjp` through `jax.lax.stop_gradient`.",
        "The loss has shape (16,) and dtype float32. It must be a real scalar or a "
        "Mean(total, weight) ...",
    ),
    "OptimizerError": Help(
        "The optimizer computes the loss again within an update, as line searches do; "
        "it is not an Optax transformation; it gets arrays that are not matrices, or "
        "dimension numbers or a mask of another model; or `eight_bit_state` finds no "
        "moments in its state.",
        "Use the optimizer without the line search, or use another optimizer. Make "
        "dimension numbers and masks from the Trainer's model, with "
        "`muon_dimension_numbers(model)` and `decay_mask(model)` in "
        "`optimizer=lambda model: ...`.",
        "The optimizer needs arguments that a step cannot give: ... such as "
        "optax.lbfgs(1e-2, linesearch=None).",
    ),
    "OffloadError": Help(
        "The inputs of blocks should be offloaded to the host, but no remat policy keeps "
        "them; or the devices cannot access pinned host memory.",
        'Pass `remat="full"` with a `Stack`; or leave `offload` out. '
        "[What to offload](howto.md#a-model-that-does-not-fit-offload-the-optimizer)",
        "Offload(activations='block_inputs') moves the inputs of blocks, which are kept "
        "only with remat ... Pass remat='full' ...",
    ),
    "NonFiniteLossError": Help(
        "The loss became `nan` or `inf`: a division by zero, a `log` of zero, a "
        "learning rate that is too high.",
        "The message names the step and the arrays. Look at the step's batch; clip gradients "
        "with `optax.clip_by_global_norm(1.0)`; or leave such steps out: "
        "[Leave out bad steps](howto.md#leave-out-bad-steps).",
        "[A loss that is not finite](pitfalls.md#a-loss-that-is-not-finite)",
    ),
    "DataError": Help(
        "A batch holds strings, objects or integers beyond 32 bits; or the data is not "
        "an iterable; or a run cannot resume with the data, because its order differs.",
        "Convert to NumPy arrays of numbers before the Trainer sees them; give a "
        "shuffle a seed.",
        "[64-bit numbers](pitfalls.md#64-bit-numbers), "
        "[the next batch](data.md#the-next-batch)",
    ),
    "BatchShapeError": Help(
        "The rows of a batch do not divide among devices and microbatches; or a later "
        "batch has another shape, such as the last of an epoch.",
        "Take one of the sizes in the message; drop or pad the last batch.",
        "[Shapes that change](pitfalls.md#shapes-that-change)",
    ),
    "DataExhaustedError": Help(
        "The data ended before `num_steps`, the total of the run.",
        "Repeat it, for instance with `itertools.cycle(batches)`.",
        "Data ended before step 2 of 3: list gave 1 batches here, 0 of them skipped to "
        "resume ...",
    ),
    "LogFileError": Help(
        "`JSONLinesLogger` was given a file that another program wrote.",
        "Choose another path.",
        "Line 1 of 'notes.txt' is 'Monday' ...",
    ),
    "CheckpointError": Help(
        "A checkpoint is saved out of order, with data that JSON cannot hold, or "
        "restored in the middle of a fit.",
        "Stop the fit first with `trainer.stop(reason)`; keep steps ascending.",
        "restore() was called in the middle of a fit, which counts its steps from the "
        "state that it began with ...",
    ),
    "CheckpointDirectoryError": Help(
        "The directory cannot be written, or another run uses it.",
        "Give each run a different directory, or end the other run.",
        "'runs/a' is in use by another run: ... Two runs would delete each other's "
        "checkpoints ...",
    ),
    "CheckpointSaveError": Help(
        "A save failed in the background: a full disk, a lost connection, or copies of an "
        "array that differ.",
        'Free space and start again; with `Checkpoint(on_save_error="warn")` training '
        "continues.",
        "Saving step 500 failed: No space left on device ...",
    ),
    "CheckpointReadError": Help(
        "Files of a checkpoint are missing, half written, or of another layout.",
        "Restore an older step; `python -m nnx_parallel inspect DIR --verify` says "
        "which are intact.",
        "Cannot read step 500 in 'runs/a': ... Its files are damaged, half ...",
    ),
    "CheckpointFormatError": Help(
        "The directory was written by another program, or by a later version.",
        "Move it elsewhere, or install the later version. `trainer.load_weights` reads "
        "plain Orbax checkpoints.",
        "... was not written by this library: it has no header ...",
    ),
    "CheckpointUnavailableError": Help(
        "Reading failed for a reason outside of the checkpoint: no memory, no file "
        "handles, a disk that does not respond.",
        "Start again when the cause is gone. The checkpoint has not changed.",
        "Cannot read step 500 in 'runs/a' now: ... This is not damage ...",
    ),
    "CheckpointDamagedError": Help(
        "Saved bits have changed: an array no longer matches the checksum saved with it.",
        'Restore an older step, or start with `Checkpoint(on_damage="previous")`, '
        "which does this automatically.",
        "... is damaged: 1 arrays differ from the saved values ...",
    ),
    "CheckpointNotFoundError": Help(
        "The step was never saved, or was deleted by `keep_last`.",
        "Take one of the steps in the message; `step=None` is the latest.",
        "No checkpoint for step 7 in '/runs/a'. Saved steps: [2] ...",
    ),
    "CheckpointMismatchError": Help(
        "The model or the optimizer has changed since the checkpoint was saved.",
        "Build the same model, or read a part: `load_weights(path, only=nnx.Param)`.",
        "Checkpoint 500 in 'runs/a' differs from the requested arrays: ...",
    ),
    "ProcessError": Help(
        "A process did not start, was lost, or did not make a call that all must make.",
        "Read the last lines of the process that the message names.",
        "Process 1 is lost: its connection closed without an exit message",
    ),
    "DisagreementError": Help(
        "The processes run different scripts, options, versions or data.",
        "Remove the differences that the message lists.",
        "The processes disagree about the run: seed: process 0 has 0, process 1 has 1",
    ),
    "ReplicaError": Help(
        "Copies of one array on several devices differ: faulty memory, or processes "
        "whose states have diverged. Saves compare the copies, and so does "
        "`Faults(check_replicas_every=...)`.",
        "Go back to the last checkpoint, without the devices in the message.",
        "Copies of 1 arrays differ at step 1000: ...",
    ),
    "ReplayError": Help(
        "The gradients of one step were computed twice, with different bits: a device "
        "is faulty, or an operation is not deterministic.",
        "Go back to the last checkpoint, without the devices in the message; on GPUs, "
        "set `XLA_FLAGS=--xla_gpu_deterministic_ops=true`.",
        "The gradients of step 100 were computed twice, with different bits in 2 "
        "arrays: ...",
    ),
    "VerificationError": Help(
        "`verify` found an array that differs by more than rounding from the same array "
        "of another program or of one device.",
        "Use the line at the end of the message, or report the model: "
        "[Verify a step](verify.md).",
        "Step 0: gradient of `conv.kernel`: relative difference 1.0e+00, ...",
    ),
    "ScheduleError": Help(
        "A schedule or a `Table` breaks a rule: a slot comes before its input, or a "
        "microbatch is left out.",
        "The message names the tick, stage and microbatch. Draw the table with "
        "`visualize`.",
        "The slot at tick 3 of stage 1 has microbatch 2 but chunk -1 ...",
    ),
    "PipelineError": Help(
        "The model has no `Stack`, or one with fewer layers than stages, or the loss "
        "calls the stack in a way that cannot be cut.",
        "Put the repeated blocks into one `Stack`; choose a number of stages from the "
        "message.",
        "`blocks` has 4 layers, fewer than 8 stages, which need at least one each ...",
    ),
}

BASES = ("ParallelError", "ParallelWarning")


def error_names() -> list[str]:
    """Returns the names of all classes of `nnx_parallel.errors`, in file order."""
    bases = tuple(getattr(errors, name) for name in BASES)
    return [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, bases)
    ]


def entry(name: str) -> list[str]:
    """Returns the lines of Markdown below the docstring; base classes have no lines."""
    known = HELP.get(name)
    if known is None:
        return []
    example = known.example
    if not example.startswith(
        "["
    ):  # a "[" starts a link to a page with a whole message
        example = f"`` {name}: {example} ``"
    return [
        "::::{container} error-help",
        f"**Cause.** {known.cause}",
        "",
        f"**Fix.** {known.fix}",
        "",
        f"**Example.** {example}",
        "::::",
    ]
