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
  "Llama 3 8B": { layers: 32, embed: 4096, heads: 32, kv_heads: 8, mlp: 14336,
    vocab: 128256, seq: 8192, llama: true },
  "Llama 3 70B": { layers: 80, embed: 8192, heads: 64, kv_heads: 8, mlp: 28672,
    vocab: 128256, seq: 8192, llama: true },
  "GPT-3 175B": { layers: 96, embed: 12288, heads: 96, vocab: 50304, seq: 2048 },
};

/* Dense bfloat16 FLOP/s, memory, and bandwidth of a device in one direction, from the
 * makers' data sheets. `slow` is one adapter per device: 400 Gb/s (H100), 200 Gb/s (A100).
 * Of a TPU it is half of the "bidirectional inter-chip interconnect bandwidth per chip",
 * which adds up the links along all axes of the torus. */
const MACHINES = {
  "H100 80 GB, 8 a machine": { memory: 80, tflops: 989, fast: 450, slow: 50, local: 8 },
  "A100 80 GB, 8 a machine": { memory: 80, tflops: 312, fast: 300, slow: 25, local: 8 },
  "TPU v5p, one slice": { memory: 95, tflops: 459, fast: 600, slow: 600, local: 4 },
  "TPU v5e, one slice": { memory: 16, tflops: 197, fast: 200, slow: 200, local: 4 },
};

function complete(model) {
  const m = { kv_heads: model.heads, llama: false, ...model };
  m.mlp = m.mlp || 4 * m.embed;
  m.head_dim = m.head_dim || m.embed / m.heads;
  return m;
}

/* Every parameter: its shape and the names of its dims, as models/gpt.py has them. */
function arrays(model) {
  const m = complete(model);
  const bias = !m.llama, found = [];
  const add = (names, count = 1) => {
    const shape = names.map((name) => m[name]);
    for (let i = 0; i < count; i++) found.push({ names, shape });
  };
  const norm = (...stack) => add([...stack, "embed"], bias ? 2 : 1);
  add(["vocab", "embed"]);
  if (!m.llama) add(["seq", "embed"]);
  norm("layers");
  norm("layers");
  for (const heads of ["heads", "kv_heads", "kv_heads"]) {
    add(["layers", "embed", heads, "head_dim"]);
    if (bias) add(["layers", heads, "head_dim"]);
  }
  add(["layers", "heads", "head_dim", "embed"]);
  if (bias) add(["layers", "embed"]);
  add(["layers", "embed", "mlp"], m.llama ? 2 : 1);
  if (bias) add(["layers", "mlp"]);
  add(["layers", "mlp", "embed"]);
  if (bias) add(["layers", "embed"]);
  norm();
  if (m.llama) add(["embed", "vocab"]);
  return found;
}

const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const MIN_SIZE = 1024; // FSDP leaves smaller arrays whole
const TENSOR = ["heads", "kv_heads", "mlp", "vocab"];

/* Elements on a device without and with the fsdp axis; null if an axis does not divide. */
function placed(array, plan) {
  const axes = array.names.map((name) =>
    TENSOR.includes(name) ? plan.tensor : name === "layers" ? plan.pipe : 1);
  const claimed = array.names.map((name) =>
    (TENSOR.includes(name) && plan.tensor > 1) || (name === "layers" && plan.pipe > 1));
  if (array.shape.some((size, dim) => size % axes[dim])) return null;
  const used = product(array.shape) / product(axes);
  const first = array.names[0] === "layers" ? 1 : 0;
  const free = array.shape.filter((size, dim) =>
    dim >= first && !claimed[dim] && size % plan.fsdp === 0);
  const split = product(array.shape) >= MIN_SIZE && free.length > 0;
  return { used, stored: split ? used / plan.fsdp : used };
}

/* Bytes per device of parameters, gradients and AdamW's state, in float32.
 * `plan`: sizes of data, fsdp, tensor, pipe; shard: optimizer, gradients or params. */
function stateBytes(model, plan) {
  let used = 0, stored = 0, outside = 0;
  for (const array of arrays(model)) {
    const place = placed(array, plan);
    if (place === null) return null;
    used += 4 * place.used;
    stored += 4 * place.stored;
    if (array.names[0] !== "layers") outside += 4 * place.used;
  }
  return {
    params: plan.shard === "params" ? stored : used,
    gradients: plan.shard === "optimizer" ? used : stored,
    optimizer: 2 * stored + 4, // two moments, and the count of steps
    used,
    outside, // of what is used: what belongs to no layer
  };
}

function countParams(model) {
  return arrays(model).reduce((sum, array) => sum + product(array.shape), 0);
}

/* Parameters that are multiplied by: kernels and the head. */
function countProducts(model) {
  const m = complete(model);
  const attention = 2 * (m.heads + m.kv_heads) * m.head_dim;
  return m.embed * (m.layers * (attention + (m.llama ? 3 : 2) * m.mlp) + m.vocab);
}

function flopsPerToken(model, seq) {
  const m = complete(model);
  return 6 * countProducts(m) + 12 * m.layers * m.heads * m.head_dim * seq;
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
 * `tokens`: of the pass, per replica; `width`: bytes of a number in the computation. */
function sentBytes(model, plan, tokens, width) {
  const m = complete(model), share = width / (plan.tensor * plan.pipe);
  const head = m.vocab * m.embed;
  const uses = countParams(m) + (m.llama ? 0 : head); // a tied table has two uses
  const replicas = plan.data * plan.fsdp;
  const sharded = plan.shard === "params" && plan.fsdp > 1;
  const activation = tokens * m.embed * width;
  return {
    gradients: replicas > 1 ? uses * share : 0,
    gathered: sharded ? (countParams(m) + countProducts(m) - head) * share : 0,
    // Once a step, what was updated: in float32, as it is stored.
    updated: plan.fsdp > 1 && !sharded ? countParams(m) * 4 / (plan.tensor * plan.pipe) : 0,
    tensor: plan.tensor > 1 ? 4 * (m.layers / plan.pipe) * activation : 0,
    pipe: plan.pipe > 1 ? 2 * activation : 0,
  };
}

/* Bytes per second of a ring over `n` devices that lie `inner` apart. Where it leaves the
 * machine, it has the adapters of all its devices in a machine. */
function bandwidth(n, inner, machine) {
  if (n * inner <= machine.local) return 1e9 * machine.fast;
  const adapters = Math.max(1, Math.floor(machine.local / inner));
  return 1e9 * Math.min(machine.fast, machine.slow * adapters);
}

/* Seconds that a device sends in a step. The mesh puts `tensor` innermost, then `fsdp`,
 * `data` and `pipe`. */
function commSeconds(plan, sent, machine) {
  const over = (bytes, n, inner) => bytes * (n - 1) / n / bandwidth(n, inner, machine);
  const { tensor, fsdp, data } = plan;
  // Gradients that stay whole are all-reduced; others are scattered over `fsdp`, and what
  // is left of them summed over `data`.
  const gradients = plan.shard === "optimizer"
    ? 2 * over(sent.gradients, data * fsdp, tensor)
    : over(sent.gradients, fsdp, tensor)
      + 2 * over(sent.gradients / fsdp, data, fsdp * tensor);
  // A hop to the next stage goes from one device to one other.
  const isInside = plan.pipe * data * fsdp * tensor <= machine.local;
  const pipe = sent.pipe / (1e9 * (isInside ? machine.fast : machine.slow));
  return over(sent.updated, fsdp, tensor) + plan.microbatches * (gradients
    + over(sent.gathered, fsdp, tensor) + 2 * over(sent.tensor, tensor, 1) + pipe);
}

/* One plan on some machines: memory, time, and what keeps it from running. */
function judge(model, plan, machine) {
  const m = complete(model), replicas = plan.data * plan.fsdp;
  const state = stateBytes(m, plan);
  const rows = machine.rows / (replicas * plan.microbatches);
  if (state === null || !Number.isInteger(rows) || rows < 1) return null;
  const tokens = rows * machine.seq, W = 2; // of one pass on one device; bfloat16
  const table = schedule("1F1B", plan.pipe, plan.microbatches);
  const stage = m.layers / plan.pipe;
  const inputs = table.kept * stage * tokens * m.embed * W;
  const block = (2 * tokens * W * (4 * m.embed
    + (2 * (m.heads + m.kv_heads) * m.head_dim + (m.llama ? 3 : 2) * m.mlp) / plan.tensor));
  const layers = 2 * (state.used - state.outside) / stage;
  const copies = W / 4 * (plan.shard === "params" ? Math.max(layers, state.outside)
    : state.used);
  const memory = state.params + state.gradients + state.optimizer + inputs + block + copies;

  const devices = replicas * plan.tensor * plan.pipe;
  const flops = flopsPerToken(m, machine.seq) * machine.rows * machine.seq / devices;
  const compute = flops / (1e12 * machine.tflops * machine.attained);
  const sent = sentBytes(m, plan, tokens, W);
  const seconds = commSeconds(plan, sent, machine);
  return {
    plan, state, memory, inputs, block, copies, bubble: 1 - table.efficiency,
    fits: memory <= machine.memory * 1e9,
    low: table.efficiency * compute / (compute + seconds),
    high: table.efficiency * compute / Math.max(compute, seconds),
  };
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

/* Their sizes. */
function places(model, machine) {
  const found = [], m = complete(model);
  for (const tensor of divisors(machine.devices).filter((t) => t <= machine.local)) {
    for (const pipe of divisors(machine.devices / tensor).filter((p) => p <= 64)) {
      if (m.layers % pipe) continue;
      const rest = machine.devices / (tensor * pipe);
      const base = { tensor, pipe };
      found.push({ ...base, data: rest, fsdp: 1, shard: null });
      if (rest === 1) continue;
      for (const shard of ["gradients", "params"]) {
        found.push({ ...base, data: 1, fsdp: rest, shard });
      }
      const inner = machine.local / tensor;
      if (rest > inner && rest % inner === 0 && inner > 1) {
        found.push({ ...base, data: rest / inner, fsdp: inner, shard: "params" });
      }
    }
  }
  return found;
}

/* Those that fit, the best first, each once; and the smallest of those that do not. */
function choose(model, machine) {
  const judged = plans(model, machine).map((plan) => judge(model, plan, machine))
    .filter((each) => each !== null);
  const simple = (each) => ["tensor", "pipe"].filter((a) => each.plan[a] > 1).length;
  const found = judged.filter((each) => each.fits)
    .sort((a, b) => Math.round(100 * b.low) - Math.round(100 * a.low)
      || simple(a) - simple(b) || a.plan.microbatches - b.plan.microbatches
      || a.memory - b.memory);
  const codes = found.map((each) => code(each.plan));
  const fitting = found.filter((each, i) => codes.indexOf(codes[i]) === i);
  const smallest = judged.sort((a, b) => a.memory - b.memory)[0];
  return { fitting, smallest };
}

/* The line of code. */
function code(plan) {
  const parts = [];
  if (plan.pipe > 1) parts.push(`Pipeline(${plan.pipe})`);
  if (plan.data > 1) parts.push(`DataParallel(${plan.data})`);
  if (plan.fsdp > 1) {
    const shard = plan.shard === "params" ? "" : `, shard="${plan.shard}"`;
    parts.push(`FSDP(${plan.fsdp}${shard})`);
  }
  if (plan.tensor > 1) parts.push(`TensorParallel(${plan.tensor})`);
  if (parts.length === 0) parts.push("DataParallel(1)");
  return parts.length === 1 ? parts[0] : `Composite(${parts.join(", ")})`;
}

if (typeof module !== "undefined") {
  module.exports = { MODELS, MACHINES, arrays, bandwidth, choose, code, commSeconds,
    countParams, countProducts, flopsPerToken, judge, schedule, sentBytes, stateBytes };
}
