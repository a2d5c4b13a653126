"""About 410 mistakes of users, for `benchmarks.mistakes`.

Each mistake has a line ``# NAME :: WORDS`` and the code of the user. A good message has
all words; words are separated by ``;``, and ``a|b`` accepts either. The code uses the
names of `benchmarks.mistakes`.
"""

MODEL = """
# names of more dims than the array :: names; dims
def build(rngs):
    init = nnx.with_partitioning(nnx.initializers.zeros, ("embed", "mlp", "heads"))
    return nnx.Linear(8, 4, kernel_init=init, rngs=rngs)
fit(model=build, strategy=n.FSDP())
# misspelt logical name :: emb; embed
def build(rngs):
    init = nnx.with_partitioning(nnx.initializers.zeros, ("embde", "mlp"))
    return nnx.Linear(8, 4, kernel_init=init, rngs=rngs)
fit(model=build, strategy=n.FSDP())
# rngs forgotten in a layer :: rngs
class Forgets(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(8, 4)
fit(model=Forgets)
# model called at once without rngs :: rngs
fit(model=MLP())
# a list of layers in an attribute :: nnx.List
class Lists(nnx.Module):
    def __init__(self, rngs):
        self.layers = [nnx.Linear(8, 8, rngs=rngs) for _ in range(2)]
    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
fit(model=Lists)
# a dict of layers in an attribute :: nnx.Dict|nnx.data
class Dicts(nnx.Module):
    def __init__(self, rngs):
        self.layers = {"a": nnx.Linear(8, 4, rngs=rngs)}
    def __call__(self, x):
        return self.layers["a"](x)
fit(model=Dicts)
# no super().__init__ in a subclass :: selects no Variable
class Half(MLP):
    def __init__(self, rngs):
        self.bias_by = 1.0
    def __call__(self, x):
        return self.a(x)
fit(model=Half)
# model with another call signature :: train; x: f32
class Train(MLP):
    def __call__(self, x, train):
        return super().__call__(x)
fit(model=Train)
# model without __call__ :: __call__|not callable; model
class Silent(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(8, 4, rngs=rngs)
fit(model=Silent)
# the input is too wide for the first layer :: 8; 9; layer `a`; last dim
fit([{"x": np.ones((16, 9), np.float32), "y": Y}])
# a hidden layer of another width :: layer `b`; last dim
class Widths(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(8, 16, rngs=rngs)
        self.b = nnx.Linear(12, 4, rngs=rngs)
    def __call__(self, x):
        return self.b(self.a(x))
fit(model=Widths)
# model returned by no lambda: None :: model; return
fit(model=lambda rngs: None)
# model function returns a class :: model; class|return
fit(model=lambda rngs: MLP)
# model function returns model and optimizer :: model; tuple
fit(model=lambda rngs: (MLP(rngs), optax.sgd(0.1)))
# a seed in place of rngs :: rngs
fit(model=lambda rngs: MLP(0))
# a PyTorch-style sequential list :: nnx.Module|nnx.Sequential
fit(model=[nnx.Linear(8, 4, rngs=nnx.Rngs(0))])
# a plain Python class as the model :: nnx.Module
class Plain:
    def __init__(self, rngs):
        self.a = nnx.Linear(8, 4, rngs=rngs)
fit(model=Plain)
# if on a traced value in the model :: jnp.where|lax.cond
class Branch(MLP):
    def __call__(self, x):
        return super().__call__(x) if x.sum() > 0 else x[:, :4]
fit(model=Branch)
# numpy in the model :: jnp; numpy|NumPy
class Numpy(MLP):
    def __call__(self, x):
        return super().__call__(np.tanh(x))
fit(model=Numpy)
# float() in the model :: jnp; float
class Floats(MLP):
    def __call__(self, x):
        return super().__call__(x) * float(x.mean())
fit(model=Floats)
# a plain attribute changes in each call :: no effect; Variable
class Counts(MLP):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = 0
    def __call__(self, x):
        self.calls += 1
        return super().__call__(x)
fit(model=Counts)
# a traced array kept in an attribute :: __init__; last
class Keeps(MLP):
    def __call__(self, x):
        self.last = nnx.relu(self.a(x))
        return self.b(self.last)
fit(model=Keeps)
# floats into an embedding :: integer; layer `a`
fit([{"x": np.ones((16, 8), np.float32), "y": Y}], model=Embeds)
# tokens above the vocabulary :: valid tokens; table
fit([{"x": np.full((16, 8), 99, np.int32), "y": Y}], model=Embeds)
# tokens into a linear layer :: nnx.Embed; batch['x']; `a.kernel`
fit([{"x": np.ones((16, 8), np.int32), "y": Y}])
# images of bytes into a convolution :: / 255; uint8; `a.kernel`
images = np.full((16, 8, 8, 3), 200, np.uint8)
fit([{"x": images, "y": Y}], model=Convs)
# a Variable subclass that nobody trains :: wrt; selects no
class Weight(nnx.Variable):
    pass
class Own(nnx.Module):
    def __init__(self, rngs):
        self.w = Weight(jnp.ones((8, 4)))
    def __call__(self, x):
        return x @ self.w[...]
fit(model=Own)
# a parameter that is a bare array :: nnx.Param
class Bare(MLP):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.gain = jax.random.normal(rngs.params(), (4,))
fit(model=Bare)
# dropout without rngs :: rngs
class Drops(MLP):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.5)
    def __call__(self, x):
        return self.drop(super().__call__(x))
fit(model=Drops)
# the model in evaluation mode :: evaluation mode
model = WithDropout(nnx.Rngs(0))
model.eval()
fit(model=model)
# a part of the model that is never used :: spare|not used|no gradient
class Spare(MLP):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.spare = nnx.Linear(8, 8, rngs=rngs)
fit(model=Spare)
# layers overwritten in a loop :: layer `a`|last dim
class Loop(nnx.Module):
    def __init__(self, rngs):
        for width in (8, 16):
            self.a = nnx.Linear(width, 16, rngs=rngs)
    def __call__(self, x):
        return self.a(x)
fit(model=Loop)
# stop_gradient over the model's output :: gradient; constant|every|no parameter
fit(loss=lambda m, b: ((jax.lax.stop_gradient(m(b["x"])) - 1) ** 2).mean())
# heads do not divide the width :: heads; divi|multiple
fit_gpt(config=dict(embed_dim=30, num_heads=4))
# more key-value heads than heads :: num_kv_heads
fit_gpt(config=dict(num_heads=2, num_kv_heads=4))
# a config in place of the model :: GPTConfig; nnx.Module
fit_gpt(model=GPTConfig.tiny())
# the model class of a config without it :: config
fit_gpt(model=GPT)
# sequences longer than the context :: seq_len|positions
fit_gpt([np.zeros((8, 80), np.int32)], config=dict(positions="learned", seq_len=32))
"""

LOSS = """
# predictions (N, 1) against labels (N,) :: (16, 1); (16,); (16, 16)
fit(model=One, loss=lambda m, b: ((m(b["x"]) - b["t"]) ** 2).mean())
# predictions (N,) against labels (N, 1) :: (16, 1); (16,); (16, 16)
data = [{"x": X, "t": T[:, None]}]
fit(data, model=One, loss=lambda m, b: ((m(b["x"])[:, 0] - b["t"]) ** 2).mean())
# a binary loss of logits (N, 1) :: (16, 1); (16,); (16, 16)
def loss(m, b):
    return optax.sigmoid_binary_cross_entropy(m(b["x"]), b["t"]).mean()
fit(model=One, loss=loss)
# an accuracy of (N,) against (N, 1) :: (16, 1); (16,); (16, 16)
def loss(m, b):
    out = m(b["x"])
    correct = out.argmax(-1) == b["y"]
    return ce(m, {"x": b["x"], "y": b["y"][:, 0]}), {"accuracy": correct.mean()}
fit([{"x": X, "y": Y[:, None]}], loss=loss)
# weights (N,) times losses (N, 1) :: (16, 1); (16,); (16, 16)
def loss(m, b):
    return (((m(b["x"]) - b["t"][:, None]) ** 2) * b["t"]).mean()
fit(model=One, loss=loss)
# an absolute error through jnp.abs and minimum :: (16, 1); (16,); (16, 16)
def loss(m, b):
    return jnp.minimum(jnp.abs(b["t"] - m(b["x"])), 1.0).mean()
fit(model=One, loss=loss)
# a vector of losses :: scalar; .mean()
fit(loss=lambda m, b: optax.softmax_cross_entropy_with_integer_labels(
    m(b["x"]), b["y"]))
# a scalar of shape (1,) :: shape (1,); scalar
fit(loss=lambda m, b: ce(m, b)[None])
# three values :: tuple; metrics
fit(loss=lambda m, b: (ce(m, b), 1.0, 2.0))
# metrics first :: loss; dict
fit(loss=lambda m, b: ({"a": 1.0}, ce(m, b)))
# a dict without the loss :: "loss"|'loss'
fit(loss=lambda m, b: {"mse": ce(m, b)})
# nothing returned :: NoneType; scalar
def loss(m, b):
    ce(m, b)
fit(loss=loss)
# a Python float that depends on nothing :: gradient; constant|parameter
fit(loss=lambda m, b: 0.5)
# a NumPy constant :: gradient; constant|parameter
fit(loss=lambda m, b: np.float32(0.5))
# argmax in the loss :: gradient; constant|parameter
fit(loss=lambda m, b: (m(b["x"]).argmax(-1) - b["y"]).astype(float).mean() ** 2)
# accuracy as the loss :: gradient; constant|parameter
fit(loss=lambda m, b: (m(b["x"]).argmax(-1) != b["y"]).astype(jnp.float32).mean())
# rounding of the predictions :: gradient; constant|parameter
fit(loss=lambda m, b: (jnp.round(m(b["x"])) - b["y"][:, None]).sum())
# a complex loss :: real
fit(loss=lambda m, b: ce(m, b) * 1j)
# a bool loss :: bool; scalar|real
fit(loss=lambda m, b: ce(m, b) > 0)
# a string :: str; scalar
fit(loss=lambda m, b: "loss")
# float() of the loss :: jnp; float
fit(loss=lambda m, b: float(ce(m, b)))
# .item() of the loss :: item; traced|jnp
fit(loss=lambda m, b: ce(m, b).item())
# numpy of the predictions :: jnp; NumPy|numpy
fit(loss=lambda m, b: np.mean(np.asarray(m(b["x"]))))
# a NumPy function of traced arrays :: jnp; NumPy|numpy
fit(loss=lambda m, b: (np.where(m(b["x"]) > 0, 1.0, 0.0)).mean())
# if on the loss :: jnp.where|lax.cond
fit(loss=lambda m, b: ce(m, b) if ce(m, b) > 1 else 0.0)
# a Python loop over a traced length :: lax.|jnp.
fit(loss=lambda m, b: sum(m(b["x"]).mean() for _ in range(b["y"][0])))
# boolean indexing :: jnp.where
fit(loss=lambda m, b: m(b["x"])[b["y"] > 0].mean())
# nonzero :: jnp.where|size=
fit(loss=lambda m, b: m(b["x"])[jnp.nonzero(b["y"])[0]].mean())
# one-hot labels for integer labels :: integer; one-hot|one_hot|argmax
data = [{"x": X, "y": np.eye(4, dtype=np.float32)[Y]}]
fit(data)
# integer labels for one-hot labels :: one_hot; labels
fit(loss=lambda m, b: optax.softmax_cross_entropy(m(b["x"]), b["y"]).mean())
# labels as floats :: integer; labels|astype
data = [{"x": X, "y": Y.astype(np.float32)}]
fit(data)
# labels (N, 1) for integer labels :: labels; (16, 1)|squeeze|[:, 0]
fit([{"x": X, "y": Y[:, None]}])
# labels from 1 to 4 of 4 classes :: valid values|valid labels
fit([{"x": X, "y": Y + 1}])
# labels -1 for padding :: mask; batch['y']
fit([{"x": X, "y": np.where(Y == 0, -1, Y)}])
# softmax twice :: softmax; logits
fit(loss=lambda m, b: optax.softmax_cross_entropy_with_integer_labels(
    jax.nn.softmax(m(b["x"])), b["y"]).mean())
# the log of a probability of 0 :: nan|inf; finite
fit(loss=lambda m, b: jnp.log(m(b["x"]) * 0).mean())
# a square root at 0 :: finite; grad
fit(loss=lambda m, b: jnp.sqrt((m(b["x"]) * 0) ** 2).mean())
# a division by the masked count of 0 :: finite
fit(loss=lambda m, b: (m(b["x"]) * 0).sum() / jnp.float32(0))
# the sum over rows with microbatches :: microbatch; Mean
fit(num_microbatches=2, loss=lambda m, b: (m(b["x"]) ** 2).sum())
# a loss that jits and takes value_and_grad itself :: loss; tuple|scalar|grad
fit(loss=lambda m, b: nnx.value_and_grad(ce)(m, b))
# the model from outside :: from outside; first argument
model = MLP(nnx.Rngs(0))
fit(model=model, loss=lambda m, b: ce(model, b))
# the model of another scope inside a list :: from outside|constant|gradient
models = [MLP(nnx.Rngs(0))]
fit(model=models[0], loss=lambda m, b: ce(models[0], b))
# data from outside of the loss :: batch; outside|closes over|constant
data = jnp.asarray(X)
fit(loss=lambda m, b: (m(data) ** 2).mean())
# one argument :: loss(model, batch)
fit(loss=lambda m: 0.0)
# three arguments :: loss(model, batch)
fit(loss=lambda model, x, y: 0.0)
# the Keras order :: loss(model, batch)
fit(loss=lambda y_true, y_pred: ((y_true - y_pred) ** 2).mean())
# an Optax loss itself :: loss(model, batch)
fit(loss=optax.l2_loss)
# a loss's name :: loss; function
fit(loss="mse")
# a loss module's class :: loss(model, batch)|function|class
class Loss:
    def __call__(self, m, b):
        return ce(m, b)
fit(loss=Loss)
# an attribute of the batch :: batch['x']|batch["x"]
fit(loss=lambda m, b: (m(b.x) ** 2).mean())
# the batch's pair by name :: tuple; unpack
fit([(X, Y)])
# the pair of a dict :: dict; batch['x']|batch["x"]|names
def loss(m, batch):
    x, y = batch
    return ce(m, {"x": x, "y": y})
fit(loss=loss)
# the batch by an index :: has no 0; names
fit(loss=lambda m, b: (m(b[0]) ** 2).mean())
# tokens as floats :: integer
fit_gpt([np.zeros((8, 33), np.float32)])
# images of channels first :: last dim|layer
fit([{"x": np.ones((16, 3, 8, 8), np.float32), "y": Y}], model=Convs)
# images without the batch dim :: layer|dim
fit([{"x": np.ones((16, 8, 3), np.float32), "y": Y}], model=Convs)
# the whole dict to the model :: batch; names|dict
fit(loss=lambda m, b: m(b).mean())
# a coroutine as the loss :: async|coroutine
async def loss(m, b):
    return 0.0
fit(loss=loss)
# a generator as the loss :: generator
def loss(m, b):
    yield ce(m, b)
fit(loss=loss)
# print of values in the loss :: jax.debug.print
fit(loss=lambda m, b: ce(m, b) * int(f"{ce(m, b):.0f}"))
# the gradient of jax.grad with respect to the model :: nnx.grad|grad
fit(loss=lambda m, b: jax.grad(lambda v: m(v))(b["x"]).mean())
# metrics of lists of text :: Metric; str
fit(loss=lambda m, b: (ce(m, b), {"note": "good"}))
# two names of metrics that are reserved :: reports itself
fit(loss=lambda m, b: (ce(m, b), {"step": 1.0}))
# a Mean of a mean and a count :: Mean; total
fit(loss=lambda m, b: n.Mean(ce(m, b), jnp.float32(16)), data=[BATCH])
"""

BATCH = """
# an array per step, shuffled out of rows :: rows; disagree
fit([{"x": X, "y": Y[:10]}])
# not divisible :: Nearest
fit([{"x": X[:10], "y": Y[:10]}])
# fewer rows than devices :: Nearest|multiple
fit([{"x": X[:2], "y": Y[:2]}])
# no rows :: no rows
fit([{"x": X[:0], "y": Y[:0]}])
# an empty dict :: holds no arrays
fit([{}])
# None in place of a batch :: no arrays
fit([None])
# text :: dtype; encode
fit([{"x": X, "y": Y, "text": np.array(["a"] * 16)}])
# a list of text :: text; encode
fit([{"x": X, "y": Y, "text": ["a"] * 16}])
# objects :: dtype object; numbers
fit([{"x": X, "y": Y, "o": np.array([None] * 16, object)}])
# ragged rows :: dtype object; numbers
ragged = np.empty(16, object)
ragged[:] = [np.ones(i + 1) for i in range(16)]
fit([{"x": ragged, "y": Y}])
# lists of lists :: asarray
fit([{"x": X.tolist(), "y": Y.tolist()}])
# a pandas-like frame :: asarray|pytree|arrays
class DataFrame:
    pass
fit([DataFrame()])
# a date :: dtype; encode|numbers
fit([{"x": X, "y": Y, "t": np.array(["2020-01-01"] * 16, "datetime64[D]")}])
# float64 above the range of float32 :: inf|float32
fit([{"x": np.full((16, 8), 1e300), "y": Y}])
# NaN in the first batch :: NaN in batch['x']
fit([{"x": np.full((16, 8), np.nan, np.float32), "y": Y}])
# infinity in the batch :: finite; batch['x']
fit([{"x": np.full((16, 8), np.inf, np.float32), "y": Y}])
# big integers :: wrap
fit([{"x": X, "y": Y.astype(np.int64) + 2**40}])
# uint8 token ids that wrap :: valid
fit_gpt([np.full((8, 33), 300, np.int32).astype(np.uint16)])
# a used generator :: read before
g = iter([BATCH])
list(g)
fit(g)
# one generator for two trainers :: iterator; before
g = (BATCH for _ in range(2))
t = make()
t.fit(g, 2)
make().fit(g, 2)
# a generator with epochs :: num_epochs; iterator
make().fit((BATCH for _ in range(2)), num_epochs=2)
# a generator function that is not called :: Call the function
def batches():
    yield BATCH
fit(batches)
# the dataset in place of batches :: one dict; [batch]
fit({"x": np.ones((64, 8), np.float32), "y": np.zeros(64, np.int32)})
# a pair (x, y) in place of batches :: shape; first batch
make(loss=lambda m, b: (m(b) ** 2).mean()).fit((X, Y), 2)
# a list of rows in place of batches :: rows|batch; dim
fit([{"x": X[0], "y": Y[0]}])
# an array of many batches :: iterable; [batch]
fit_gpt(np.zeros((4, 8, 33), np.int32))
# text as data :: one str
fit("data.jsonl")
# a path as data :: iterable|iterated
fit(Path("data"))
# None as data :: iterable|iterated
fit(None)
# an integer as data :: iterable|iterated
fit(10)
# too few batches :: ended before step; repeat
make().fit([BATCH], 3)
# an infinite iterator with epochs :: num_epochs; iterator
make().fit(itertools.cycle([BATCH]), num_epochs=1)
# a changing name :: same structure
make().fit([BATCH, {"x": X, "label": Y}], 2)
# a changing width :: shape; first batch
make().fit([BATCH, BATCH | {"x": np.ones((16, 9), np.float32)}], 2)
# a dtype that changes :: dtype; first batch
make().fit([BATCH, BATCH | {"y": Y.astype(np.float32)}], 2)
# tuples and extra :: batch
fit([(0, BATCH)])
# an image transposed with rows last :: rows; disagree
fit([{"x": X.T, "y": Y}])
# a Shared of rows :: rows
fit([{"x": Shared(X), "y": Shared(Y)}])
# a batch with only a scalar :: rows
fit([{"x": np.float32(1.0)}])
# a raw key :: key
fit([{"x": X[:2], "y": Y[:2], "k": jax.random.PRNGKey(0)}], devices=jax.devices()[:2])
# a masked array :: mask
fit([{"x": np.ma.masked_array(X, mask=X > 0), "y": Y}])
# a sparse or other foreign array :: asarray|arrays
class Sparse:
    shape, dtype = (16, 8), np.float32
fit([{"x": Sparse(), "y": Y}])
# a batch that holds a whole list of batches :: rows|list|batch
fit([[BATCH, BATCH]])
# a list of paths :: text; encode
fit(["a.npy", "b.npy"])
# last_batch of another library :: last_batch
make().fit([BATCH], 1, last_batch="keep")
# drop_last= :: last_batch
make().fit([BATCH], 1, drop_last=True)
# batch_size= in fit :: global_batch_size
make().fit([BATCH], 1, batch_size=16)
# a global batch size in quotes :: global_batch_size
fit(global_batch_size="16")
# a global batch size of 0 :: global_batch_size
fit(global_batch_size=0)
# shuffle= in fit :: shuffle
make().fit([BATCH], 1, shuffle=True)
# data that raises StopIteration in a generator :: StopIteration
def batches():
    yield BATCH
    raise StopIteration
make().fit(batches(), 2)
# an error inside the data :: KeyError|missing
def batches():
    yield {"x": X, "y": {}["missing"]}
fit(batches())
# num_steps as a float :: integer
make().fit([BATCH] * 4, 1.5)
# neither steps nor epochs :: num_steps
make().fit([BATCH])
# both :: one of them
make().fit([BATCH], num_steps=1, num_epochs=1)
# a step's number below the trained ones :: total
t = make()
t.fit([BATCH] * 4, 4)
t.fit([BATCH] * 4, 2)
# num_steps counted anew in the second fit :: already; totals
t = make()
t.fit([BATCH] * 4, 4)
t.fit([BATCH] * 4, 4)
# eval_data is one batch :: one dict
make().fit([BATCH], 1, eval_data=BATCH)
"""

OPTIMIZER = """
# a number :: optimizer; optax
fit(optimizer=1e-3)
# a name :: optimizer; optax
fit(optimizer="adam")
# a function of Optax :: Call it
fit(optimizer=optax.sgd)
# the class of a transformation :: class; optax
fit(optimizer=optax.GradientTransformation)
# an nnx.ModelAndOptimizer-like pair :: optimizer; optax
fit(optimizer=(optax.sgd(0.1), None))
# None :: optimizer; optax
fit(optimizer=None)
# a schedule :: schedule
fit(optimizer=optax.constant_schedule(0.1))
# the learning rate in quotes :: learning; number|'0.1'
fit(optimizer=optax.sgd("0.1"))
# a negative learning rate :: learning rate; negative|below 0|ascend
fit(optimizer=optax.sgd(-0.1))
# a negative learning rate of adam :: learning rate; negative|below 0|ascend
fit(optimizer=optax.adamw(-1e-3))
# a learning rate of 0 :: learning rate; 0
fit(optimizer=optax.sgd(0.0))
# a learning rate of 1e5 :: finite|learning rate
make(optimizer=optax.sgd(1e5)).fit([BATCH] * 40, 40)
# decay of 1e5 :: decay
fit(optimizer=optax.adamw(1e-3, weight_decay=1e5))
# no learning rate: gradient ascent :: learning rate|ascend|scale
fit(optimizer=optax.scale_by_adam())
# only clipping :: learning rate|ascend|optimizer
fit(optimizer=optax.clip_by_global_norm(1.0))
# a function of the model that needs other arguments :: optimizer; model
fit(optimizer=lambda model, steps: optax.sgd(0.1))
# a function that returns nothing :: optimizer; return
fit(optimizer=lambda model: None)
# a function that returns a function :: optimizer
fit(optimizer=lambda model: optax.sgd)
# the state in place of the transformation :: optimizer
fit(optimizer=optax.sgd(0.1).init({"a": jnp.ones(2)}))
# a mask of another model :: mask|tree|structure
fit(optimizer=optax.masked(optax.sgd(0.1), {"w": True}))
# a line search :: value_fn
fit(optimizer=optax.lbfgs())
# multi_transform without labels for all :: label|param
fit(optimizer=optax.multi_transform({"a": optax.sgd(0.1)}, lambda p: jax.tree.map(
    lambda _: "b", p)))
# a schedule that ends long before the run :: learning rate; 0
t = make(optimizer=optax.adamw(optax.linear_schedule(1e-3, 0.0, 5)))
t.fit([BATCH] * 40, 40)
# a schedule that never leaves 0 :: learning rate; 0
t = make(optimizer=optax.adamw(optax.linear_schedule(0.0, 0.0, 5)))
t.fit([BATCH] * 8, 8)
# a learning rate that is an array of two :: learning rate|shape
fit(optimizer=optax.sgd(jnp.array([0.1, 0.2])))
# MultiSteps of 0 :: every_k|MultiSteps|positive
fit(optimizer=optax.MultiSteps(optax.sgd(0.1), 0))
# a momentum above 1 :: finite|momentum
make(optimizer=optax.sgd(0.1, momentum=3.0)).fit([BATCH] * 200, 200)
# frozen everything :: trained|frozen|zero
fit(optimizer=optax.set_to_zero())
"""

STRATEGY = """
# a typo in an argument :: size
fit(strategy=n.FSDP(sise=8))
# too many devices :: 16; 8
fit(strategy=n.FSDP(16))
# a size of 0 :: at least 1
fit(strategy=n.FSDP(0))
# a negative size :: at least 1
fit(strategy=n.TensorParallel(-1))
# a float size :: integer
fit(strategy=n.FSDP(8.0))
# sizes that do not multiply :: 8
fit(strategy=n.Composite(n.DataParallel(2), n.FSDP(2)))
# two without a size :: size
fit(strategy=n.Composite(n.DataParallel(), n.FSDP()))
# two of one kind :: FSDP|fsdp
fit(strategy=n.Composite(n.FSDP(2), n.FSDP(4)))
# a list of strategies in Composite :: list
fit(strategy=n.Composite([n.FSDP(2), n.DataParallel()]))
# a class in Composite :: FSDP(
fit(strategy=n.Composite(n.FSDP, n.DataParallel(2)))
# a pipeline of a model without Stack :: Stack
fit(strategy=n.Pipeline(2), devices=jax.devices()[:2])
# microbatches do not divide the batch :: Nearest|multiple
fit_gpt(strategy=n.Pipeline(2), devices=jax.devices()[:2], num_microbatches=3)
# more stages than layers :: layers; stage
fit_gpt(strategy=n.Pipeline(8), num_microbatches=8)
# heads that tensor devices cannot share :: heads; divide
fit_gpt(strategy=n.TensorParallel(8), config=dict(num_heads=2, num_kv_heads=2))
# a tensor strategy of a model without names :: names
fit(strategy=n.TensorParallel(8))
# context without attention :: attention|context|ContextParallel
fit(strategy=n.ContextParallel(8))
# a context that does not divide the sequence :: 31|divi|multiple
fit_gpt([np.zeros((8, 32), np.int32)], strategy=n.ContextParallel(8))
# experts without experts :: expert
fit(strategy=n.ExpertParallel(8))
# rules for a name that the model does not have :: embed|name
fit(strategy=n.FSDP(rules=(n.LogicalRules({"emb": "fsdp"}),)))
# rules for a misspelt axis :: axis; fsdp
fit(strategy=n.FSDP(rules=(n.PathRules((".*kernel", P(None, "fdsp"))),)))
# a dict of rules :: rules
fit(strategy=n.FSDP(rules={"embed": "fsdp"}))
# a shard word :: params
fit(strategy=n.FSDP(shard="zero3"))
# ZeRO by its number :: params
fit(strategy=n.FSDP(shard=3))
# min_size as text :: min_size
fit(strategy=n.FSDP(min_size="1MB"))
# a mesh in place of the strategy :: Strategy
fit(strategy=n.make_mesh({"data": 8}))
# devices as a count :: devices
fit(devices=4)
# a device twice :: devices|duplicate|twice
fit(devices=[jax.devices()[0]] * 2)
# no devices :: devices
fit(devices=[])
# simulate devices too late :: before
n.simulate_devices(4)
# a mesh of a list :: dict|axes|mesh
n.make_mesh(["data"])
# a mesh size as text :: integer|size
n.make_mesh({"data": "8"})
# a strategy called with a model :: size|Strategy
fit(strategy=n.FSDP(MLP))
# interleaved chunks do not divide the layers :: chunk|layers
fit_gpt(strategy=n.Pipeline(2, n.Interleaved(chunks=3)), devices=jax.devices()[:2],
    num_microbatches=2)
# the strategy of one device under names="auto" without sample :: sample
fit(names="auto")
# names of a path that matches nothing :: path|match
fit(names=n.PathNames((r"kernle", ("embed", "mlp"))), strategy=n.TensorParallel(8))
"""

TRAINER = """
# a typo :: strategy
fit(strategi=n.FSDP())
# Lightning's arguments :: precision|Trainer
fit(accelerator="gpu")
# the loss missing :: loss
n.Trainer(MLP, SGD)
# everything missing :: model|missing
n.Trainer()
# the optimizer missing :: optimizer
n.Trainer(MLP, loss=ce)
# the order loss, optimizer :: order
n.Trainer(MLP, ce, SGD)
# the optimizer first :: model
n.Trainer(SGD, MLP, ce)
# microbatches 0 :: num_microbatches
fit(num_microbatches=0)
# microbatches as a float :: num_microbatches
fit(num_microbatches=2.0)
# log_every 0 :: log_every
fit(log_every=0)
# log_every as a float :: log_every
fit(log_every=0.5)
# a seed of text :: seed
fit(seed="42")
# a key as the seed :: seed
fit(seed=jax.random.key(0))
# no seed :: seed
fit(seed=None)
# precision as text :: Precision
fit(precision="bf16-mixed")
# precision 16 :: Precision
fit(precision=16)
# a misspelt dtype :: float
n.Precision(compute="bloat16")
# int8 as the dtype :: float
fit(precision=n.Precision(compute="int8"))
# ema 1 :: below 1
fit(ema_decay=1.0)
# ema True :: ema_decay
fit(ema_decay=True)
# ema of a percentage :: below 1
fit(ema_decay=99.9)
# ema without ema_decay :: ema_decay
make().evaluate([BATCH], ema=True)
# wrt of text :: wrt
fit(wrt="kernel")
# wrt of nothing :: wrt
fit(wrt=nnx.BatchStat)
# wrt of a list :: wrt
fit(wrt=["a"])
# remat text :: remat
fit(remat="everything")
# remat without blocks :: Stack
fit(remat="full")
# a callback's class :: Call the class
fit(callbacks=[n.EarlyStopping])
# a function as a callback :: Callback
fit(callbacks=[lambda trainer, step, metrics: None])
# a callback with a misspelt hook :: on_step_end
class Hook(n.Callback):
    def on_step_ends(self, trainer, step, metrics):
        pass
fit(callbacks=[Hook()])
# a hook of another library :: on_step_end
class Hook(n.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        pass
fit(callbacks=[Hook()])
# a hook with too few arguments :: on_step_end; metrics
class Hook(n.Callback):
    def on_step_end(self, trainer):
        pass
fit(callbacks=[Hook()])
# early stopping on a metric that does not exist :: val_loss; eval_loss
fit(callbacks=[n.EarlyStopping("val_loss")], eval_data=[BATCH])
# early stopping without evaluation :: eval_data
fit(callbacks=[n.EarlyStopping("eval_loss")])
# a patience of 0 :: patience
n.EarlyStopping("eval_loss", patience=0)
# a mode of text :: mode
n.EarlyStopping("eval_loss", mode="lowest")
# loggers as text :: Logger
fit(loggers="wandb")
# a Python logger :: Logger
import logging
fit(loggers=[logging.getLogger()])
# faults as text :: Faults
fit(faults="skip")
# verify as a bool :: debugging|verify
fit(verify=True)
# an assignment that has no effect :: no effect
t = make()
t.strategy = n.FSDP()
# a misspelt attribute :: callbacks; Trainer(...)
make().callback = []
# an attribute of another library :: no attribute
make().max_epochs = 3
# fit_transform :: attribute|no method
make().fit_transform([BATCH])
# a call of the trainer :: fit; predict; train_step
make()(BATCH)
# forward of the trainer :: predict
make().forward(X)
# evaluate of nothing :: empty
make().evaluate([])
# evaluate of a used generator :: empty|read
g = iter([])
make().evaluate(g)
# predict of a loss :: rows
make().predict([BATCH], ce)
# predict without a function :: function; batch
make().predict([BATCH])
# predict of a module that is not the trained one :: model
model = MLP(nnx.Rngs(0))
make(model=model).predict([BATCH], lambda m, b: model(b["x"]))
# metrics of a step by another name :: has
make().fit([BATCH], 1)["val_loss"]
# history by an attribute :: history|loss
make().fit([BATCH], 1).loss
# the state twice :: donated
t = make()
s, b = t.state, t.shard_batch(BATCH)
t.train_step(s, b)
t.train_step(s, b)
# arguments of the step swapped :: state, batch
t = make()
t.train_step(t.shard_batch(BATCH), t.state)
# the trainer's model after a step :: donated; trainer.model
t = make()
model = t.model
t.fit([BATCH], 1)
model(jnp.asarray(X))
# a state of another model :: state
t = make()
t.state = make(model=One, loss=lambda m, b: m(b["x"]).mean()).state
# shard_batch of a list :: asarray
make().shard_batch({"x": X.tolist()})
# restore without a directory :: checkpoint
make().restore()
# profile of text :: profile
n.Debugging(profile="yes")
# fast_dev_run in the trainer :: Debugging
fit(fast_dev_run=True)
# overfit in the trainer :: Debugging
fit(overfit_batches=1)
# mesh in the trainer :: Backend
fit(mesh=n.make_mesh({"data": 8}))
# eval_params in the trainer :: Evaluation
fit(eval_params="ema")
"""

CHECKPOINT = """
# a missing directory :: No directory
make().restore(directory=tmp / "nothing")
# a file in place of a directory :: directory
(tmp / "file").write_text("")
fit(checkpoint=tmp / "file")
# a file to restore from :: No directory
(tmp / "file").write_text("")
make().restore(directory=tmp / "file")
# an empty directory :: No checkpoint|no checkpoint
make(checkpoint=tmp).restore()
# an unknown step :: Saved steps
make(checkpoint=tmp).fit([BATCH], 1)
make(checkpoint=tmp).restore(7)
# a step as text :: step
make(checkpoint=tmp).fit([BATCH], 1)
make(checkpoint=tmp).restore("latest")
# another model :: [16]; [32]
make(checkpoint=tmp).fit([BATCH], 1)
make(model=Wide, checkpoint=tmp).fit([BATCH] * 2, 2)
# a renamed layer :: only in
class Renamed(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.b = nnx.Linear(16, 4, rngs=rngs)
    def __call__(self, x):
        return self.b(self.first(x))
make(checkpoint=tmp).fit([BATCH], 1)
make(model=Renamed, checkpoint=tmp).fit([BATCH] * 2, 2)
# another optimizer :: weights_only
make(checkpoint=tmp).fit([BATCH], 1)
make(optimizer=optax.adam(0.1), checkpoint=tmp).fit([BATCH] * 2, 2)
# another order of the data :: data|order
a, b = {"x": X, "y": Y}, {"x": X + 1, "y": Y}
make(checkpoint=tmp).fit([a, b, a, b], 2)
make(checkpoint=tmp).fit([b, a, b, a], 4)
# another seed :: seed
make(checkpoint=tmp).fit([BATCH], 1)
make(checkpoint=tmp, seed=3).fit([BATCH] * 2, 2)
# every 0 :: every
n.Checkpoint(tmp, every=0)
# keep 0 :: keep_last
n.Checkpoint(tmp, keep_last=0)
# keep= :: keep_last
n.Checkpoint(tmp, keep=3)
# every as a float :: every
n.Checkpoint(tmp, every=1.5)
# best of a metric that does not exist :: accuracy
fit(checkpoint=n.Checkpoint(tmp, keep_best="accuracy"), eval_data=[BATCH])
# best without evaluation :: eval_data
fit(checkpoint=n.Checkpoint(tmp, keep_best="eval_loss"))
# best mode :: best_mode
n.Checkpoint(tmp, keep_best="eval_loss", best_mode="lowest")
# checkpoint True :: directory
fit(checkpoint=True)
# a class :: Checkpoint(
fit(checkpoint=n.Checkpoint)
# a directory of an Orbax checkpoint :: load_weights
import orbax.checkpoint as ocp
with ocp.StandardCheckpointer() as c:
    c.save(tmp / "orbax", nnx.state(MLP(nnx.Rngs(0))))
make().restore(directory=tmp / "orbax")
# weights of a missing file :: nothing
make().load_weights(tmp / "nothing")
# weights of our checkpoint :: restore
make(checkpoint=tmp).fit([BATCH], 1)
make().load_weights(tmp)
# restore of the best, never ranked :: keep_best
make(checkpoint=tmp).fit([BATCH], 1)
make(checkpoint=tmp).restore("best")
# a directory that cannot be written :: Cannot write
fit(checkpoint="/proc/nothing")
# save twice :: already
t = make(checkpoint=tmp)
t.fit([BATCH], 1)
t.save()
# the history of a run that is over :: ran no step
make(checkpoint=tmp).fit([BATCH], 1)
make(checkpoint=tmp).fit([BATCH], 1)["loss"]
# a second model in the directory of the first :: Build the same model
t = make(checkpoint=tmp)
t.fit([BATCH], 1)
u = make(checkpoint=tmp, model=Wide)
u.state
# safetensors as checkpoints :: Pretrained|from_pretrained|restore
from nnx_parallel.weights import save_safetensors
save_safetensors(tmp / "model.safetensors", MLP(nnx.Rngs(0)))
make().load_weights(tmp / "model.safetensors")
"""

TEXT = """
# a string as the prompt :: tokens
generate(gpt(), "hello", max_new_tokens=2, temperature=0)
# a list as the prompt :: array
generate(gpt(), [[1, 2]], max_new_tokens=2, temperature=0)
# one row without the batch dim :: (batch, prompt_len)|batch
generate(gpt(), jnp.array([1, 2]), max_new_tokens=2, temperature=0)
# a prompt of floats :: int
generate(gpt(), jnp.ones((1, 2)), max_new_tokens=2, temperature=0)
# an empty prompt :: at least 1|empty|prompt
generate(gpt(), jnp.zeros((1, 0), jnp.int32), max_new_tokens=2, temperature=0)
# tokens out of range :: 255|256
generate(gpt(), jnp.array([[1, 999]]), max_new_tokens=2, temperature=0)
# negative tokens :: 255|256
generate(gpt(), jnp.array([[1, -1]]), max_new_tokens=2, temperature=0)
# no key :: key
generate(gpt(), PROMPT, max_new_tokens=2)
# an integer as the key :: key
generate(gpt(), PROMPT, max_new_tokens=2, key=0)
# a negative temperature :: temperature
generate(gpt(), PROMPT, max_new_tokens=2, temperature=-1.0)
# a temperature in quotes :: temperature
generate(gpt(), PROMPT, max_new_tokens=2, temperature="0")
# no new tokens :: max_new_tokens
generate(gpt(), PROMPT, max_new_tokens=0, temperature=0)
# new tokens as a float :: max_new_tokens
generate(gpt(), PROMPT, max_new_tokens=2.0, temperature=0)
# the name of another library :: max_new_tokens
generate(gpt(), PROMPT, max_length=10, temperature=0)
# beyond the context :: positions|seq_len
generate(gpt(positions="learned", seq_len=8), PROMPT, max_new_tokens=20, temperature=0)
# top_k 0 :: top_k
generate(gpt(), PROMPT, max_new_tokens=2, top_k=0, key=jax.random.key(0))
# top_k as a float :: top_k
generate(gpt(), PROMPT, max_new_tokens=2, top_k=5.0, key=jax.random.key(0))
# top_p 2 :: top_p
generate(gpt(), PROMPT, max_new_tokens=2, top_p=2.0, key=jax.random.key(0))
# a stop of text :: stop
generate(gpt(), PROMPT, max_new_tokens=2, temperature=0, stop=["</s>"])
# a trainer in place of the model :: trainer.model|eval_model|Trainer
generate(make(), PROMPT, max_new_tokens=2, temperature=0)
# a config in place of the model :: GPTConfig
generate(GPTConfig.tiny(), PROMPT, max_new_tokens=2, temperature=0)
# the class in place of the model :: GPT
generate(GPT, PROMPT, max_new_tokens=2, temperature=0)
# the arguments swapped :: GPT
generate(PROMPT, gpt(), max_new_tokens=2, temperature=0)
# prompts of text to pad :: tokens
pad_prompts(["hello", "you"])
# one prompt to pad :: prompt
pad_prompts([1, 2, 3])
# lengths of the new tokens :: lengths
generate(gpt(), PROMPT, max_new_tokens=2, temperature=0, lengths=jnp.array([9]))
# a missing folder :: nothing
GPT.from_pretrained(tmp / "nothing")
# a folder without a config :: config.json
GPT.from_pretrained(tmp)
# a config without sizes :: vocab_size
(tmp / "config.json").write_text(json.dumps({"model_type": "llama"}))
GPT.from_pretrained(tmp)
# an unknown family :: model_type|family
(tmp / "config.json").write_text(json.dumps({"model_type": "mamba"}))
GPT.from_pretrained(tmp)
# a vision model as a GPT :: model_type
(tmp / "config.json").write_text(json.dumps({"model_type": "vit"}))
GPT.from_pretrained(tmp)
# only a PyTorch file :: safetensors
llama(tmp)
(tmp / "model.safetensors").rename(tmp / "pytorch_model.bin")
GPT.from_pretrained(tmp)
# a damaged file :: model.safetensors
llama(tmp)
(tmp / "model.safetensors").write_bytes(b"damaged")
GPT.from_pretrained(tmp)
# a broken config :: config.json
(tmp / "config.json").write_text("{")
GPT.from_pretrained(tmp)
# weights of another size :: shape|embed_dim
llama(tmp)
fit_gpt(model=GPT.from_pretrained(tmp, embed_dim=96))
# an option that does not exist :: seq_len|argument
llama(tmp)
GPT.from_pretrained(tmp, max_seq_len=64)
# from_pretrained inside the lambda :: lambda
llama(tmp)
fit_gpt(model=lambda rngs: GPT.from_pretrained(tmp)(rngs))
# save of a model without a table of names :: names=
save_pretrained(tmp / "x", MLP(nnx.Rngs(0)))
# save of a trainer :: trainer.eval_model
save_pretrained(tmp / "x", make())
# LoRA rank 0 :: rank
lora(gpt(), targets="query", rank=0)
# LoRA that matches nothing :: matches no layer
lora(gpt(), targets="q_proj")
# LoRA of a list :: regex
lora(gpt(), targets=["query", "value"])
# LoRA of a class :: config
fit_gpt(model=lora(GPT, targets="query"))
# LoRA without wrt: everything is trained :: wrt=nnx.LoRAParam
fit_gpt(model=lora(gpt(), targets="query"))
# wrt without LoRA :: wrt
fit_gpt(wrt=nnx.LoRAParam)
# merge without adapters :: no adapters
merge_lora(gpt())
# a negative alpha :: alpha
lora(gpt(), targets="query", alpha="16")
# samples without a tokenizer :: encode
n.TextSamples("hello")
"""

COMMANDS = """
# a misspelt command :: plan
cli("plann", "train.py")
# no command :: COMMAND|command
cli()
# launch without processes :: --processes
cli("launch", "train.py")
# a missing script :: nothing.py
cli("launch", "--processes", "2", str(tmp / "nothing.py"))
# processes in words :: --processes
cli("launch", "--processes", "two", "train.py")
# zero processes :: --processes
cli("launch", "--processes", "0", "train.py")
# torchrun's option :: --processes
cli("launch", "--nproc_per_node", "2", "train.py")
# a misspelt option :: --processes
cli("launch", "--process", "2", "--cpuu", "train.py")
# options on both sides :: write it before
cli("launch", "--processes", "2", "train.py", "--cpu")
# a plan without topology :: --topology
script()
cli("plan", str(tmp / "train.py"))
# a plan of an unknown topology :: v5p
script()
cli("plan", str(tmp / "train.py"), "--topology", "v9:2x2")
# a plan of a missing script :: nothing.py
cli("plan", str(tmp / "nothing.py"), "--topology", "cpu:8")
# a plan of a script that never fits :: fit
(tmp / "train.py").write_text("x = 1")
cli("plan", str(tmp / "train.py"), "--topology", "cpu:8")
# a plan of a script with a syntax error :: SyntaxError|syntax
(tmp / "train.py").write_text("x = (")
cli("plan", str(tmp / "train.py"), "--topology", "cpu:8")
# inspect of nothing :: nothing
cli("inspect", str(tmp / "nothing"))
# inspect without a directory :: directory
cli("inspect")
# verify of a missing script :: nothing.py
cli("verify", str(tmp / "nothing.py"))
# the number of processes without the coordinator :: COORDINATOR
os.environ["NNX_PARALLEL_NUM_PROCESSES"] = "2"
n.initialize()
# a process number beyond the count :: process_id|PROCESS_ID
n.initialize("localhost:1234", 2, 5)
# a coordinator without a port :: port
n.initialize("localhost", 2, 0)
# processes in words in the environment :: NUM_PROCESSES
os.environ["NNX_PARALLEL_COORDINATOR"] = "localhost:1234"
os.environ["NNX_PARALLEL_NUM_PROCESSES"] = "two"
os.environ["NNX_PARALLEL_PROCESS_ID"] = "0"
n.initialize()
# initialize after devices were counted :: before
jax.devices()
n.initialize("localhost:1234", 2, 0)
# a model with a typo in its config :: num_layers
GPTConfig.tiny(num_layer=2)
# a config of text :: num_layers
GPTConfig.tiny(num_layers="2")
# a negative size :: embed_dim
GPTConfig.tiny(embed_dim=-8)
# a preset that does not exist :: tiny; preset(
GPTConfig.small()
# a missing preset of a vision model :: preset(; b16
n.models.ViTConfig.base16()
# a model without rngs :: rngs
GPT(GPTConfig.tiny())
# a config by position :: rngs
GPT(GPTConfig.tiny(), nnx.Rngs(0))
# plan of a script :: Trainer
n.plan("train.py", topology="cpu:8")
# visualize of a class :: model|Trainer
n.visualize(MLP)
# an import that moved :: nnx_parallel.models
n.GPTConfig
# a name that does not exist :: DataParallel
n.DDP
# a player of another type :: Player
n.Players(a=optax.sgd(0.1))
# players and a loss :: loss
fit(optimizer=n.Players(a=n.Player(SGD, ce)), loss=ce)
# an evaluation without data :: eval_data
make().fit([BATCH], 1, eval_every=1)
# an evaluation every 0.5 steps :: eval_every
make().fit([BATCH], 1, eval_data=[BATCH], eval_every=0.5)
# an evaluation by an iterator :: iterator
make().fit([BATCH], 1, eval_data=iter([BATCH]))
# a metric of arrays in the evaluation :: scalar; Sum
make().evaluate([BATCH], loss=lambda m, b: (ce(m, b), {"all": m(b["x"])}))
# names that collide :: reports itself
make().evaluate([BATCH], loss=lambda m, b: (ce(m, b), {"eval_loss": 1.0}))
# an evaluation's loss in quotes :: function
make().evaluate([BATCH], loss="accuracy")
# an Evaluation of unknown parameters :: ema
n.Evaluation(params="average")
# dropout in the evaluation by an argument :: training mode
make(model=Modes, loss=lambda m, b: m(b["x"], train=True).mean()).evaluate([BATCH])
# a Mean of weight 0 :: weight; count
make(loss=lambda m, b: n.Mean(m(b["x"]).sum(), 0.0)).fit([BATCH], 1)
# the training batch of another key in the evaluation :: no 'y'
make().evaluate([{"x": X}])
# samples of nothing :: prompts
fit(callbacks=[n.TextSamples()])
"""

AREAS = {
    "model": MODEL,
    "loss": LOSS,
    "batch": BATCH,
    "optimizer": OPTIMIZER,
    "strategy": STRATEGY,
    "trainer": TRAINER,
    "checkpoint": CHECKPOINT,
    "text and weights": TEXT,
    "commands, environment, configs, evaluation": COMMANDS,
}
