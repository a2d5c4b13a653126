/* The form of the calculator: reads the fields; writes a verdict, a table, and of the chosen
 * row its memory and its script. The fields are also in the address, to be shared. */
"use strict";

(() => {
  const form = document.getElementById("calculator");
  if (!form) return;
  const find = (name) => document.getElementById(`calculator-${name}`);
  const field = (name) => form.elements.namedItem(name);
  const number = (name) => Number(field(name).value);
  const SIZES = ["layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "experts",
    "top_k", "shared", "dense_layers", "dense_mlp"];
  const PARTS = ["llama", "qk_norm"];
  const NONE = { head_dim: 0, experts: 0, top_k: 1, shared: 0, dense_layers: 0, dense_mlp: 0 };
  const MACHINE = ["local", "memory", "usable", "tflops", "float32", "fast", "links", "slow"];
  const OWN = "my own";

  function options(name, values) {
    field(name).replaceChildren(...values.map((value) => new Option(value, value)));
  }

  function fillModel() {
    const model = MODELS[field("model").value];
    if (!model) return;
    const all = { ...NONE, kv_heads: model.heads, mlp: 4 * model.embed, ...model };
    for (const name of [...SIZES, "seq"]) field(name).value = all[name];
    for (const name of PARTS) field(name).checked = Boolean(model[name]);
  }

  function fillMachine() {
    const machine = MACHINES[field("machine").value];
    if (!machine) return;
    for (const [name, value] of Object.entries(machine)) field(name).value = value;
  }

  function read() {
    const model = Object.fromEntries([...SIZES, "seq"].map((name) => [name, number(name)]));
    for (const name of PARTS) model[name] = field(name).checked;
    const machine = Object.fromEntries(
      [...MACHINE, "devices", "rows", "seq"].map((name) => [name, number(name)]));
    machine.attained = [number("slowest") / 100, number("fastest") / 100];
    const settings = Object.fromEntries(
      Object.keys(DEFAULTS).map((name) => [name, field(name).value]));
    return { model, machine, settings };
  }

  /* Every field as the address has it, and back. */
  const fields = () => [...form.elements].filter((e) => e.name);
  const valueOf = (e) => e.type === "checkbox" ? String(e.checked) : e.value;

  function writeAddress() {
    const all = new URLSearchParams(fields().map((e) => [e.name, valueOf(e)]));
    history.replaceState(null, "", `#${all}`);
  }

  function readAddress() {
    const all = new URLSearchParams(location.hash.slice(1));
    for (const e of fields().filter((e) => all.has(e.name))) {
      if (e.type === "checkbox") e.checked = all.get(e.name) === "true";
      else e.value = all.get(e.name);
      // A preset of a page that is newer or older than this one.
      if (e.tagName === "SELECT" && e.selectedIndex < 0) e.selectedIndex = 0;
    }
  }

  const gigabytes = (bytes) => bytes < 9.995e11 ? `${(bytes / 1e9).toPrecision(3)} GB`
    : `${(bytes / 1e12).toPrecision(3)} TB`;
  /* Two numbers with one unit: "4.26 to 4.38 s", or "45 %" where both read the same. */
  function range(from, to, unit, digits = 3) {
    const [a, b] = [from, to].map((n) => String(Number(n.toPrecision(digits))));
    return `${a === b ? b : `${a} to ${b}`} ${unit}`;
  }
  const percent = (from, to) => range(100 * from, 100 * to, "%", 2);
  const seconds = (from, to) => to < 1 ? range(1000 * from, 1000 * to, "ms", 2)
    : range(from, to, "s");
  const tokens = (from, to) => to < 1e6 ? range(from / 1e3, to / 1e3, "k")
    : range(from / 1e6, to / 1e6, "M");

  function element(tag, text, attributes = {}) {
    const made = document.createElement(tag);
    made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  function row(each, index) {
    const made = document.createElement("tr");
    const first = document.createElement("td"), label = document.createElement("label");
    const choice = element("input", "", { type: "radio", name: "calculator-row" });
    choice.checked = index === 0;
    choice.addEventListener("change", () => showDetail(each));
    label.append(choice, element("code", code(each.plan)));
    first.append(label);
    const { slow, fast } = each;
    made.append(first, ...[
      percent(slow.mfu, fast.mfu),
      seconds(fast.seconds, slow.seconds),
      tokens(slow.tokens, fast.tokens),
      gigabytes(each.memory),
      String(each.plan.microbatches),
    ].map((text) => element("td", text)));
    return made;
  }

  /* The memory of a device as one bar, a colour for each owner. */
  function showMemory(each, machine) {
    const all = machine.memory * 1e9, usable = usableBytes(machine);
    const parts = Object.entries(each.owners).filter(([, bytes]) => bytes > 0);
    const free = Math.max(0, usable - each.memory);
    parts.push(["free", free], ["not usable", Math.max(0, all - usable)]);
    const whole = Math.max(all, each.memory);
    find("bar").replaceChildren(...parts.map(([owner, bytes]) => element("span", "",
      { "data-owner": owner, style: `width:${100 * bytes / whole}%`,
        title: `${owner}: ${gigabytes(bytes)}` })));
    find("owners").replaceChildren(...parts.map(([owner, bytes]) =>
      element("li", `${owner} ${gigabytes(bytes)}`, { "data-owner": owner })));
    find("bar").setAttribute("aria-label", "Memory of a device: "
      + parts.map(([owner, bytes]) => `${owner} ${gigabytes(bytes)}`).join(", "));
  }

  function showDetail(each) {
    const { model, machine } = read();
    find("script").textContent = script(model, each, machine);
    find("bubble").textContent = each.plan.pipe === 1 ? ""
      : `Bubble of the pipeline: ${percent(each.bubble, each.bubble)} of a step.`;
    find("experts").textContent = expertsOf(model, each);
    showMemory(each, machine);
    find("detail").hidden = false;
  }

  /* What the experts of a device take and send, in words; nothing without any. */
  function expertsOf(model, each) {
    if (!model.experts) return "";
    const state = `State of experts on a device: ${gigabytes(each.state.experts)}. `;
    if (!(each.plan.expert > 1)) {
      return `${state}Tokens stay where they are: all experts of a layer are on each device `
        + "while it runs.";
    }
    const { gather, ragged } = each.exchange;
    return `${state}Exchange, sent by a device in a step: ${gigabytes(gather)} by gather, `
      + `${gigabytes(ragged)} by ragged; this assumes ${exchangeOf(model, each.plan)}.`;
  }

  /* What is wrong with the numbers as they are, or null. */
  function problem() {
    const least = (e) => e.min === "0" && e.step !== "any" ? 0 : Number.MIN_VALUE;
    const isLow = (e) => e.value === "" || e.value < least(e);
    const isValid = (e) => !isLow(e) && e.checkValidity();
    const invalid = [...form.elements].find((e) => e.type === "number" && !isValid(e));
    if (!invalid) return modelProblem(read().model);
    const rule = isLow(invalid) ? `give a number ${least(invalid) ? "above 0" : "from 0 on"}`
      : invalid.step === "any" ? `give at most ${invalid.max}` : "give a whole number";
    return `${invalid.labels[0].textContent.trim()}: ${rule}.`;
  }

  function verdict() {
    const wrong = problem();
    if (wrong) return [wrong, []];
    const { model, machine, settings } = read();
    const { fitting, smallest } = choose(model, machine, settings);
    const billions = (count) => `${(count / 1e9).toPrecision(3)} B`;
    const active = model.experts ? `, of which a token meets ${billions(countActive(model))}` : "";
    const size = `${billions(countParams(model))} parameters${active}.`;
    if (fitting.length) {
      return [`${size} ${fitting.length} strategies fit into ${gigabytes(usableBytes(machine))} `
        + "a device. The best by MFU without overlap come first:", fitting.slice(0, 8)];
    }
    if (smallest) {
      return [`${size} Nothing fits ${gigabytes(usableBytes(machine))} of the `
        + `${machine.memory} GB. Closest is ${code(smallest.plan)}, in `
        + `${smallest.plan.microbatches} microbatches, with ${gigabytes(smallest.memory)} `
        + "a device: take more devices, or fewer sequences.", []];
    }
    return [divisionProblem(model, machine), []];
  }

  function show() {
    const [text, rows] = verdict();
    find("verdict").textContent = text;
    find("rows").replaceChildren(...rows.map(row));
    find("table").hidden = rows.length === 0;
    find("detail").hidden = true;
    if (rows.length) showDetail(rows[0]);
  }

  function copies(button, text) {
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(text());
      const label = button.textContent;
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = label; }, 1500);
    });
  }

  options("model", [...Object.keys(MODELS), OWN]);
  options("machine", [...Object.keys(MACHINES), OWN]);
  options("optimizer", Object.keys(OPTIMIZERS));
  options("precision", Object.keys(PRECISIONS));
  options("remat", ["full", "dots", "none"]);
  field("model").value = "Llama 3 8B";
  field("machine").value = Object.keys(MACHINES).find((name) => name.startsWith("H100"));
  [field("slowest").value, field("fastest").value] = CALCULATOR.products;
  fillModel();
  fillMachine();
  readAddress();
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    if (event.target === field("model")) fillModel();
    else if (event.target === field("machine")) fillMachine();
    else if ([...SIZES, ...PARTS].includes(event.target.name)) field("model").value = OWN;
    else if (MACHINE.includes(event.target.name)) field("machine").value = OWN;
    writeAddress();
    show();
  });
  copies(find("copy-script"), () => find("script").textContent);
  copies(find("copy-link"), () => { writeAddress(); return location.href; });
  show();
})();
