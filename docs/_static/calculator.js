/* Which strategies fit a model on some machines, and what they cost.
 *
 * Arithmetic without a page: tests run it in Node and compare it with what `describe`
 * counts, what the schedule simulator says and what a compiled step sends. The form is in
 * `calculator-form.js`. */
"use strict";

const MODELS = {
  "GPT-2 124M": { layers: 12, embed: 768, heads: 12, vocab: 50257, seq: 1024 },
  "GPT-2 Medium": { layers: 24, embed: 1024, heads: 16, vocab: 50304, seq: 1024 },
  "GPT 1.3B": { layers: 24, embed: 2048, heads: 16, vocab: 50304, seq: 2048 },
  "Llama 2 7B": { layers: 32, embed: 4096, heads: 32, mlp: 11008, vocab: 32000,
    seq: 4096, llama: true },
  "Mistral 7B": { layers: 32, embed: 4096, heads: 32, kv_heads: 8, mlp: 14336,
    vocab: 32000, seq: 8192, llama: true },
  "Llama 3 8B": { layers: 32, embed: 4096, heads: 32, kv_heads: 8, mlp: 14336,
    vocab: 128256, seq: 8192, llama: true },
  "Llama 3 70B": { layers: 80, embed: 8192, heads: 64, kv_heads: 8, mlp: 28672,
    vocab: 128256, seq: 8192, llama: true },
  "GPT-3 175B": { layers: 96, embed: 12288, heads: 96, vocab: 50304, seq: 2048 },
  "Mixtral 8x7B": { layers: 32, embed: 4096, heads: 32, kv_heads: 8, mlp: 14336,
    vocab: 32000, seq: 32768, llama: true, experts: 8, top_k: 2 },
  "Qwen3 30B-A3B": { layers: 48, embed: 2048, heads: 32, kv_heads: 4, head_dim: 128,
    mlp: 768, vocab: 151936, seq: 40960, llama: true, qk_norm: true, experts: 128,
    top_k: 8 },
  "Like DeepSeek-V3": { layers: 61, embed: 7168, heads: 64, kv_heads: 8, head_dim: 128,
    mlp: 2048, vocab: 129280, seq: 4096, llama: true, experts: 256, top_k: 8,
    shared: 2048, dense_layers: 3, dense_mlp: 18432 },
};

/* Hardware and what is assumed of it are those of `plan`: the page puts them here. */
const { machines: MACHINES, links: LINKS } = CALCULATOR;

/* Copies of the parameters that an optimizer keeps, and whether it counts its steps. */
const OPTIMIZERS = {
  AdamW: { moments: 2, counts: true, code: "optax.adamw(3e-4)" },
  Lion: { moments: 1, counts: true, code: "optax.lion(1e-4)" },
  "SGD with momentum": { moments: 1, counts: false, code: "optax.sgd(0.1, momentum=0.9)" },
};

/* Bytes of a stored parameter and of a number in the computation. Gradients are summed up
 * in float32. */
const PRECISIONS = {
  "mixed bfloat16": { stored: 4, width: 2, code: "Precision.mixed_bfloat16()" },
  bfloat16: { stored: 2, width: 2, code: "Precision(params=jnp.bfloat16)" },
  float32: { stored: 4, width: 4, code: "Precision()" },
};

const DEFAULTS = { optimizer: "AdamW", precision: "mixed bfloat16", remat: "full" };

/* All sizes. `experts`: their number in a layer, 0 without; `mlp` is then the width of one,
 * `shared` that of the MLP for every token. The first `dense_layers` have one of `dense_mlp`. */
function complete(model) {
  const m = { kv_heads: model.heads, llama: false, qk_norm: false, experts: 0, top_k: 1,
    shared: 0, dense_layers: 0, ...model };
  m.mlp = m.mlp || 4 * m.embed;
  m.dense_mlp = m.experts ? m.dense_mlp || 4 * m.embed : m.mlp;
  m.head_dim = m.head_dim || m.embed / m.heads;
  return m;
}

/* Layers with a plain MLP, and kernels of an MLP. */
const numDense = (m) => m.experts ? m.dense_layers : m.layers;
const numKernels = (m) => m.llama ? 3 : 2;

/* Every parameter: its shape and the names of its dims, as models/gpt.py has them. */
function arrays(model) {
  const m = complete(model);
  const found = [];
  const add = (sizes, names, count = 1) => {
    const shape = names.map((name) => sizes[name]);
    for (let i = 0; i < count; i++) found.push({ names, shape });
  };
  const norm = m.llama ? 1 : 2; // a scale, and a bias
  add(m, ["vocab", "embed"]);
  if (!m.llama) add(m, ["seq", "embed"]);
  const dense = numDense(m);
  const stacks = [
    { ...m, layers: dense, mlp: m.dense_mlp, experts: 0, shared: 0 },
    { ...m, layers: m.layers - dense, expert: m.experts, router: m.experts },
  ];
  for (const sizes of stacks.filter((each) => each.layers > 0)) {
    addLayers(sizes, (names, count) => add(sizes, ["layers", ...names], count), norm);
  }
  add(m, ["embed"], norm);
  if (m.llama) add(m, ["embed", "vocab"]);
  return found;
}

/* The arrays of equal layers. */
function addLayers(m, add, norm) {
  const bias = !m.llama;
  add(["embed"], 2 * norm);
  if (m.qk_norm) add(["head_dim"], 2);
  for (const heads of ["heads", "kv_heads", "kv_heads"]) {
    add(["embed", heads, "head_dim"]);
    if (bias) add([heads, "head_dim"]);
  }
  add(["heads", "head_dim", "embed"]);
  if (bias) add(["embed"]);
  const kernels = numKernels(m);
  if (m.experts) { // without biases
    add(["embed", "router"]);
    add(["expert", "embed", "mlp"], kernels - 1);
    add(["expert", "mlp", "embed"]);
    if (m.shared) add(["embed", "shared"], kernels - 1);
    if (m.shared) add(["shared", "embed"]);
    return;
  }
  add(["embed", "mlp"], kernels - 1);
  if (bias) add(["mlp"]);
  add(["mlp", "embed"]);
  if (bias) add(["embed"]);
}

const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const MIN_SIZE = 1024; // FSDP leaves smaller arrays whole
const contextOf = (plan) => plan.context || 1; // devices that share a sequence
const expertOf = (plan) => plan.expert || 1; // devices that share the experts
const TENSOR = ["heads", "kv_heads", "mlp", "shared", "vocab"];
const isExpert = (array) => array.names.includes("expert");

/* Elements on a device without and with the fsdp axis; null if an axis does not divide. */
function placed(array, plan) {
  const sizes = { layers: plan.pipe, expert: expertOf(plan) };
  const axes = array.names.map((name) =>
    TENSOR.includes(name) ? plan.tensor : sizes[name] || 1);
  const claimed = axes.map((size) => size > 1);
  if (array.shape.some((size, dim) => size % axes[dim])) return null;
  const used = product(array.shape) / product(axes);
  const first = array.names[0] === "layers" ? 1 : 0;
  const divides = (n) => array.shape.some((size, dim) =>
    dim >= first && !claimed[dim] && size % n === 0);
  // FSDP takes the axes `context` and `expert` along; alone they split no other state.
  const along = contextOf(plan) * (isExpert(array) ? 1 : expertOf(plan));
  const parts = plan.fsdp === 1 || product(array.shape) < MIN_SIZE ? []
    : [plan.fsdp * along, plan.fsdp];
  return { used, stored: used / (parts.find(divides) || 1) };
}

/* Bytes per device of parameters, gradients and the optimizer's state.
 * `plan`: sizes of data, fsdp, expert, context, tensor, pipe; shard: optimizer, gradients
 * or params. */
function stateBytes(model, plan, settings = DEFAULTS) {
  const width = PRECISIONS[settings.precision].stored;
  const { moments, counts } = OPTIMIZERS[settings.optimizer];
  let used = 0, stored = 0, outside = 0;
  const layer = {}, ofExperts = { used: 0, stored: 0 };
  for (const array of arrays(model)) {
    const place = placed(array, plan);
    if (place === null) return null;
    used += place.used;
    stored += place.stored;
    if (array.names[0] !== "layers") outside += place.used;
    else { // of stacks of as many layers each
      const [count] = array.shape;
      layer[count] = (layer[count] || 0) + place.used * plan.pipe / count;
    }
    if (isExpert(array)) {
      ofExperts.used += place.used;
      ofExperts.stored += place.stored;
    }
  }
  const bytes = (x) => [
    width * (plan.shard === "params" ? x.stored : x.used),
    4 * (plan.shard === "optimizer" ? x.used : x.stored),
    moments * width * x.stored,
  ];
  const [params, gradients, optimizer] = bytes({ used, stored });
  return {
    params,
    gradients,
    optimizer: optimizer + (counts ? 4 : 0),
    experts: bytes(ofExperts).reduce((a, b) => a + b), // of the three
    layer: Math.max(...Object.values(layer)), // numbers in use of the largest one
    used, // numbers in use, on a device
    outside, // of them: what belongs to no layer
    isSharded: stored < used, // by the fsdp axis
  };
}

function countParams(model) {
  return arrays(model).reduce((sum, array) => sum + product(array.shape), 0);
}

/* Parameters of the experts, without routers and shared ones. */
function countExperts(model) {
  return arrays(model).filter(isExpert).reduce((sum, array) => sum + product(array.shape), 0);
}

/* Parameters of the experts that a token does not go to. */
function countIdle(model) {
  const m = complete(model);
  return m.experts ? countExperts(m) * (m.experts - m.top_k) / m.experts : 0;
}

/* Parameters that a token meets. */
const countActive = (model) => countParams(model) - countIdle(model);

/* Parameters that are multiplied by: kernels and the head. */
function countProducts(model) {
  const m = complete(model), dense = numDense(m);
  const attention = 2 * (m.heads + m.kv_heads) * m.head_dim;
  const mixture = m.experts + numKernels(m) * m.shared; // a router is one kernel
  const width = m.layers * attention + dense * numKernels(m) * m.dense_mlp
    + (m.layers - dense) * mixture + m.vocab;
  return m.embed * width + countExperts(m);
}

function flopsPerToken(model, seq) {
  const m = complete(model), active = countProducts(m) - countIdle(m);
  return 6 * active + 12 * m.layers * m.heads * m.head_dim * seq;
}

/* Efficiency of a schedule whose slots cost the same, and the inputs that it keeps. */
function schedule(name, stages, microbatches, chunks = 1) {
  const S = stages, M = microbatches;
  if (name === "GPipe") return { efficiency: M / (M + S - 1), kept: M };
  if (name === "1F1B") {
    return { efficiency: M / (M + S - 1), kept: Math.min(M, 2 * S - 1) };
  }
  if (name === "Zero bubble") {
    return { efficiency: (3 * M) / (3 * M + 2 * (S - 1)), kept: Math.min(M, 2 * S - 1) };
  }
  // Interleaved; S divides M.
  return { efficiency: M / (M + (S - 1) / chunks), kept: (chunks + 1) * S - 1 };
}

/* Bytes that a device puts into the collectives of one forward and backward pass.
 * `tokens`: of the pass, on a device; `width`: bytes of a number in the computation, and
 * `stored` of a parameter. */
function sentBytes(model, plan, tokens, width, stored = 4, remat = "none") {
  const m = complete(model), part = 1 / (plan.tensor * plan.pipe);
  const head = m.vocab * m.embed, experts = countExperts(m);
  const others = countParams(m) - experts;
  const uses = others + (m.llama ? 0 : head); // a tied table has two uses
  const copies = plan.data * plan.fsdp * contextOf(plan); // of an expert
  const replicas = copies * expertOf(plan);
  const own = part * experts / expertOf(plan);
  const sharded = plan.shard === "params" && plan.fsdp > 1;
  const updates = plan.fsdp > 1 && !sharded;
  const activation = tokens * m.embed * width;
  const exchanged = exchangeBytes(m, plan, tokens, width, remat);
  return {
    gradients: replicas > 1 ? uses * width * part : 0,
    gathered: sharded ? (others + countProducts(m) - experts - head) * width * part : 0,
    // Once a step, what was updated: as it is stored.
    updated: updates ? others * stored * part : 0,
    // Experts stay on the devices that have them: among their copies alone.
    experts: {
      gradients: copies > 1 ? own * width : 0,
      gathered: sharded ? 2 * own * width : 0,
      updated: updates ? own * stored : 0,
    },
    exchange: exchanged[exchangeOf(m, plan)],
    // The ring: keys and values forward and backward, and their gradients in float32.
    ring: contextOf(plan) > 1 ? 2 * tokens * m.kv_heads * m.head_dim * (2 * width + 4)
      * m.layers * part : 0,
    tensor: plan.tensor > 1 ? 4 * (m.layers / plan.pipe) * activation : 0,
    pipe: plan.pipe > 1 ? 2 * activation : 0,
  };
}

/* How tokens reach their experts on GPUs and TPUs, as `ExpertParallel(n)` chooses. */
function exchangeOf(model, plan) {
  return complete(model).top_k < expertOf(plan) - 1 ? "ragged" : "gather";
}

/* Bytes of both exchanges, likewise. Rows go to their experts and back, and their gradients
 * likewise; what remat computes again is sent again. */
function exchangeBytes(model, plan, tokens, width, remat) {
  const m = complete(model), n = expertOf(plan), k = m.top_k;
  if (n === 1) return { gather: 0, ragged: 0 };
  const layers = (m.layers - numDense(m)) / plan.pipe, again = remat === "none" ? 0 : 1;
  // Tokens of all, and their choices (int32) and weights. Outputs are not needed again.
  const gather = (4 + again) * m.embed * width + (1 + again) * k * 4
    + (2 + again) * k * width;
  // A row for each choice; outputs are not needed again.
  const ragged = (4 + again) * m.embed * width;
  return { gather: layers * tokens * n * gather, ragged: layers * tokens * k * ragged };
}

/* Devices that fast links join. */
const localOf = (machine) => machine.local || machine.devices;

/* Bytes per second of a ring over `n` devices that lie `inner` apart: at worst (`end` 0) or
 * at best (1). Along one axis of a torus it has two links, over all of them all. Where it
 * leaves the machine, it has the adapter of one device, or of all in its machine. */
function bandwidth(n, inner, machine, end) {
  const { fast, slow, links } = machine, local = localOf(machine);
  if (n * inner <= local) return 1e9 * (end ? fast : fast * Math.min(1, 2 / links));
  const adapters = Math.max(1, Math.floor(local / inner));
  return 1e9 * (end ? Math.min(fast, slow * adapters) : slow);
}

/* Seconds that a device sends in a step, at one end of the range. The mesh puts `tensor` innermost, then `context`,
 * `expert`, `fsdp`, `data` and `pipe`. */
function commSeconds(plan, sent, machine, end) {
  const over = (bytes, n, inner) => bytes * (n - 1) / n / bandwidth(n, inner, machine, end);
  const { tensor, data } = plan, context = contextOf(plan), expert = expertOf(plan);
  // What is stored: `along` of the axes inside of `fsdp` share it, `inner` devices apart.
  const ofState = (bytes, along, inner) => {
    const fsdp = plan.fsdp > 1 ? plan.fsdp * along : 1; // one collective over both
    const copies = plan.fsdp > 1 ? data : data * along;
    // Gradients that stay whole are all-reduced; others are scattered over `fsdp`, and
    // what is left of them summed over `data`.
    const gradients = plan.shard === "optimizer"
      ? 2 * over(bytes.gradients, copies * fsdp, inner)
      : over(bytes.gradients, fsdp, inner)
        + 2 * over(bytes.gradients / fsdp, copies, fsdp * inner);
    const ofPass = gradients + over(bytes.gathered, fsdp, inner);
    return over(bytes.updated, fsdp, inner) + plan.microbatches * ofPass;
  };
  const state = ofState(sent, context * expert, tensor)
    + (sent.experts ? ofState(sent.experts, context, tensor * expert) : 0);
  const exchange = over(sent.exchange || 0, expert, tensor * context);
  // A hop goes to the next device: keys and values of all others pass by.
  const hops = (context - 1) * (sent.ring || 0) / bandwidth(context, tensor, machine, end);
  // A hop to the next stage goes from one device to one other.
  const apart = data * plan.fsdp * expert * context * tensor;
  const pipe = sent.pipe / bandwidth(plan.pipe, apart, machine, end);
  return state + plan.microbatches * (2 * over(sent.tensor, tensor, 1) + pipe + hops + exchange);
}

/* Numbers that a layer keeps for the backward pass, for each token; with remat="none" all
 * activations, with "dots" its input and the outputs of products with weights. */
function keptNumbers(m, plan, remat, isDense = true) {
  const heads = m.heads * m.head_dim, keys = m.kv_heads * m.head_dim;
  if (remat === "full") return m.embed;
  const isNone = remat === "none";
  const copies = numKernels(m) - (isNone ? 0 : 1); // of hidden units
  const attention = isNone ? 4 * m.embed + 2 * (heads + keys) / plan.tensor
    : 3 * m.embed + (heads + 2 * keys) / plan.tensor;
  if (isDense) return attention + copies * m.dense_mlp / plan.tensor;
  // Products of experts count as no products with weights: "dots" computes them again.
  const routed = isNone ? numRows(m, plan) * (2 * m.embed + copies * m.mlp / plan.tensor) : 0;
  return attention + copies * m.shared / plan.tensor + routed;
}

/* Rows that a device has room for, for each of its tokens: a quarter more than its share, and
 * no more than can choose its experts. Further rows come in further rounds. */
function numRows(m, plan) {
  const most = expertOf(plan) * Math.min(m.top_k, m.experts / expertOf(plan));
  return Math.min(1.25 * m.top_k, most);
}

/* FLOPs of a token that are computed again: the forward pass, or attention and experts. */
function recomputedFlops(model, seq, remat) {
  const m = complete(model);
  if (remat === "full") return flopsPerToken(m, seq) / 3;
  if (remat === "none") return 0;
  return 4 * m.layers * m.heads * m.head_dim * seq + 2 * (countExperts(m) - countIdle(m));
}

/* One plan on some machines: memory, time, and what keeps it from running. */
function judge(model, plan, machine, settings = DEFAULTS) {
  const m = complete(model), replicas = plan.data * plan.fsdp * expertOf(plan);
  const dense = numDense(m);
  if (dense % plan.pipe || m.layers % plan.pipe) return null;
  const state = stateBytes(m, plan, settings);
  const rows = machine.rows / (replicas * plan.microbatches);
  if (state === null || !Number.isInteger(rows) || rows < 1) return null;
  if (plan.fsdp > 1 && !state.isSharded) return null; // FSDP that shards nothing
  const { width, stored } = PRECISIONS[settings.precision];
  const context = contextOf(plan);
  if (machine.seq % (2 * context) && context > 1) return null; // or unbalanced
  const tokens = rows * machine.seq / context; // of one pass on one device
  const table = schedule("1F1B", plan.pipe, plan.microbatches);
  // In the stage of a device: layers of both kinds, and what they keep.
  const kinds = [[dense, true], [m.layers - dense, false]].filter(([count]) => count > 0);
  const ofToken = kinds.reduce((sum, [count, isDense]) =>
    sum + count / plan.pipe * keptNumbers(m, plan, settings.remat, isDense), 0);
  const kept = table.kept * tokens * width * ofToken;
  const block = 2 * tokens * width
    * Math.max(...kinds.map(([, isDense]) => keptNumbers(m, plan, "none", isDense)));
  const layers = 2 * state.layer;
  // Parameters as the computation has them: gathered, or in another dtype, or both.
  const copies = plan.shard === "params" ? width * Math.max(layers, state.outside)
    : width === stored ? 0 : width * state.used;
  const owners = { parameters: state.params, gradients: state.gradients,
    optimizer: state.optimizer, "parameters in use": copies,
    "saved activations": kept, "one running layer": block };
  const memory = Object.values(owners).reduce((a, b) => a + b);

  const devices = replicas * context * plan.tensor * plan.pipe;
  const all = machine.rows * machine.seq; // tokens of a step
  const flops = flopsPerToken(m, machine.seq) * all / devices;
  const again = recomputedFlops(m, machine.seq, settings.remat) * all / devices;
  const speed = settings.precision === "float32" ? machine.float32 / 100 : 1;
  const peak = 1e12 * machine.tflops * speed;
  const [slowest, fastest] = machine.attained
    .map((share) => (flops + again) / (peak * share) / table.efficiency);
  const sent = sentBytes(m, plan, tokens, width, stored, settings.remat);
  const [longest, shortest] = LINKS.map((share, end) =>
    commSeconds(plan, sent, machine, end) / share / table.efficiency);
  // To others, of the bytes that are moved in a step.
  const others = plan.microbatches * (1 - 1 / expertOf(plan));
  const exchanged = Object.entries(exchangeBytes(m, plan, tokens, width, settings.remat))
    .map(([name, bytes]) => [name, others * bytes]);
  const timed = (seconds) => ({ seconds, tokens: all / seconds, mfu: flops / (peak * seconds) });
  return {
    plan, settings, state, memory, owners, copies, bubble: 1 - table.efficiency,
    exchange: Object.fromEntries(exchanged),
    fits: memory <= usableBytes(machine),
    slow: timed(slowest + longest), // nothing overlapped
    fast: timed(Math.max(fastest, shortest)), // all of it
  };
}

/* Bytes of a device that a program gets. */
function usableBytes(machine) {
  return machine.memory * 1e9 * (machine.usable || 100) / 100;
}

const divisors = (n) => [...Array(n).keys()].map((i) => i + 1).filter((d) => n % d === 0);

/* Every plan over all devices that divides. Pipelines get 4 microbatches a stage, others
 * 1 or more, which take less memory and send more.
 * Sharding the optimizer alone is left out: gradients too is less memory, and less sent. */
function plans(model, machine) {
  return places(model, machine).flatMap((plan) => plan.pipe > 1
    ? [{ ...plan, microbatches: 4 * plan.pipe }]
    : [1, 2, 4, 8, 16].map((microbatches) => ({ ...plan, microbatches })));
}

const RING_TOKENS = 4096;

/* Their sizes. */
function places(model, machine) {
  const found = [], m = complete(model);
  const local = localOf(machine);
  for (const tensor of divisors(machine.devices).filter((t) => t <= Math.min(local, 16))) {
    for (const pipe of divisors(machine.devices / tensor).filter((p) => p <= 64)) {
      if (m.layers % pipe) continue;
      const rest = machine.devices / (tensor * pipe);
      const base = { tensor, pipe, context: 1, expert: 1 };
      found.push({ ...base, data: rest, fsdp: 1, shard: null });
      if (rest === 1) continue;
      // A ring hides its hops behind the products of some thousand tokens a device.
      const shares = divisors(rest).filter((c) => c > 1 && machine.seq >= RING_TOKENS * c);
      for (const context of shares) {
        const fsdp = rest / context;
        const shard = fsdp > 1 ? "params" : null;
        found.push({ ...base, context, data: 1, fsdp, shard });
      }
      for (const expert of divisors(m.experts).filter((n) => n > 1 && rest % n === 0)) {
        const others = rest / expert;
        const whole = { ...base, expert, data: others, fsdp: 1, shard: null };
        found.push(whole);
        if (others > 1) {
          found.push({ ...whole, data: 1, fsdp: others, shard: "params" });
        }
      }
      for (const shard of ["gradients", "params"]) {
        found.push({ ...base, data: 1, fsdp: rest, shard });
      }
      const inner = local / tensor;
      if (rest > inner && rest % inner === 0 && inner > 1) {
        found.push({ ...base, data: rest / inner, fsdp: inner, shard: "params" });
      }
    }
  }
  return found;
}

/* Those that fit, the best first, each once; and the smallest of those that do not. */
function choose(model, machine, settings = DEFAULTS) {
  const judged = plans(model, machine)
    .map((plan) => judge(model, plan, machine, settings)).filter((each) => each !== null);
  const axes = ["tensor", "pipe", "context", "expert"];
  const simple = (each) => axes.filter((a) => each.plan[a] > 1).length;
  const found = judged.filter((each) => each.fits)
    .sort((a, b) => Math.round(100 * b.slow.mfu) - Math.round(100 * a.slow.mfu)
      || simple(a) - simple(b) || a.plan.microbatches - b.plan.microbatches
      || a.memory - b.memory);
  const codes = found.map((each) => code(each.plan));
  const fitting = found.filter((each, i) => codes.indexOf(codes[i]) === i);
  const smallest = judged.sort((a, b) => a.memory - b.memory)[0];
  return { fitting, smallest };
}

/* What is wrong with a model, in words; null if nothing is. */
function modelProblem(model) {
  const { embed, heads, kv_heads, head_dim, layers, experts, top_k, dense_layers } = model;
  if (experts && top_k > experts) {
    return `A token goes to ${top_k} experts, but a layer has ${experts}: take 1 to ${experts}.`;
  }
  if (experts && dense_layers >= layers) {
    return `${dense_layers} of ${layers} layers are dense, which leaves none with experts: `
      + `take 0 to ${layers - 1}, or no experts.`;
  }
  if (!head_dim && embed % heads) {
    const near = [embed - embed % heads, embed + heads - embed % heads].filter((n) => n > 0);
    return `Width ${embed} is not divisible by ${heads} heads. Heads must divide the width: `
      + `take ${near.join(" or ")} for the width, or ${nearestDivisor(embed, heads)} heads.`;
  }
  if (heads % kv_heads) {
    return `${heads} heads are not divisible by ${kv_heads} key heads. Each key head serves `
      + `the same number of heads: take ${nearestDivisor(heads, kv_heads)} key heads.`;
  }
  return null;
}

const nearestDivisor = (n, near) => divisors(n)
  .reduce((a, b) => Math.abs(b - near) < Math.abs(a - near) ? b : a);

/* Why no plan divides, and the nearest numbers with which one does. */
function divisionProblem(model, machine) {
  const m = complete(model), { devices, rows } = machine;
  const below = rows - rows % devices;
  const otherRows = [below, below + devices].filter((n) => n > 0).join(" or ");
  const divides = (n) => plans(m, { ...machine, devices: n })
    .some((plan) => judge(m, plan, { ...machine, devices: n }) !== null);
  let by = 1; // one device always divides
  while (![devices - by, devices + by].some((n) => n > 0 && divides(n))) by++;
  const otherDevices = [devices - by, devices + by].filter((n) => n > 0 && divides(n));
  return `${rows} sequences a step are not divisible by ${devices} devices, and no part of `
    + `the ${devices} divides the ${m.heads} heads or ${m.layers} layers so that the rest `
    + `divides the sequences. Take ${otherRows} sequences a step, or `
    + `${otherDevices.join(" or ")} devices.`;
}

/* The strategy as Python. */
function code(plan) {
  const parts = [];
  if (plan.pipe > 1) parts.push(`Pipeline(${plan.pipe})`);
  if (plan.data > 1) parts.push(`DataParallel(${plan.data})`);
  if (plan.fsdp > 1) {
    const shard = plan.shard === "params" ? "" : `, shard="${plan.shard}"`;
    parts.push(`FSDP(${plan.fsdp}${shard})`);
  }
  if (expertOf(plan) > 1) parts.push(`ExpertParallel(${plan.expert})`);
  if (contextOf(plan) > 1) parts.push(`ContextParallel(${plan.context})`);
  if (plan.tensor > 1) parts.push(`TensorParallel(${plan.tensor})`);
  if (parts.length === 0) parts.push("DataParallel(1)");
  return parts.length === 1 ? parts[0] : `Composite(${parts.join(", ")})`;
}

/* The whole script that an answer assumes. `preset`: a constructor of `GPTConfig`. */
function script(model, judged, machine) {
  const m = complete(model), { plan, settings } = judged;
  const strategy = code(plan);
  const names = ["Composite", "ContextParallel", "DataParallel", "ExpertParallel", "FSDP",
    "Pipeline", "TensorParallel"]
    .filter((name) => strategy.includes(`${name}(`));
  const ours = [...names, "Precision", "Trainer"].sort();
  const sizes = { vocab_size: m.vocab, seq_len: model.seq, num_layers: m.layers,
    embed_dim: m.embed, num_heads: m.heads, num_kv_heads: m.kv_heads,
    ...(m.head_dim * m.heads === m.embed ? {} : { head_dim: m.head_dim }),
    ...(numDense(m) ? { mlp_dim: m.dense_mlp } : {}),
    ...(m.experts && m.dense_layers ? { dense_layers: m.dense_layers } : {}) };
  const parts = m.llama ? { norm: '"rms"', positions: '"rope"', rope_theta: "500_000.0",
    activation: '"swiglu"', use_bias: "False", tied: "False" } : {};
  if (m.qk_norm) parts.qk_norm = "True";
  const shared = m.shared ? `, shared_dim=${m.shared}` : "";
  if (m.experts) {
    parts.experts = `Experts(num_experts=${m.experts}, top_k=${m.top_k}, mlp_dim=${m.mlp}`
      + `${shared}, bias_rate=0.001)`;
  }
  const lines = Object.entries({ ...sizes, ...parts })
    .map(([name, value]) => `    ${name}=${value},`);
  const { precision, optimizer, remat } = settings;
  const fraction = `XLA_PYTHON_CLIENT_MEM_FRACTION=${(machine.usable / 100).toFixed(2)}`;
  const raised = machine.local > 0 && machine.usable > 75; // JAX's share of a GPU
  return [
    ...(raised ? [`# Set ${fraction} before JAX starts: it takes 75 % of a GPU.`] : []),
    ...(precision === "bfloat16" ? ["import jax.numpy as jnp"] : []),
    "import optax",
    `from nnx_parallel import ${ours.join(", ")}`,
    ...(m.experts ? ["from nnx_parallel.layers import Experts"] : []),
    "from nnx_parallel.models import GPT, GPTConfig, next_token_loss",
    "",
    "config = GPTConfig(",
    ...lines,
    ")",
    "trainer = Trainer(",
    "    model=lambda rngs: GPT(config, rngs=rngs),",
    `    optimizer=${OPTIMIZERS[optimizer].code},`,
    "    loss=next_token_loss,",
    `    strategy=${strategy},`,
    `    num_microbatches=${plan.microbatches},`,
    `    precision=${PRECISIONS[precision].code},`,
    `    remat="${remat}",`,
    `    global_batch_size=${machine.rows},`,
    ")",
  ].join("\n");
}

if (typeof module !== "undefined") {
  module.exports = { DEFAULTS, LINKS, MODELS, MACHINES, OPTIMIZERS, PRECISIONS, arrays, bandwidth,
    choose, code, commSeconds, countActive, countParams, countProducts, divisionProblem,
    exchangeBytes, exchangeOf, flopsPerToken, judge, modelProblem, recomputedFlops, schedule,
    script, sentBytes, stateBytes };
}
