/* The form of the calculator: reads the fields, writes the table. */
"use strict";

(() => {
  const form = document.getElementById("calculator");
  if (!form) return;
  const field = (name) => form.elements.namedItem(name);
  const number = (name) => Number(field(name).value);
  const SIZES = ["layers", "embed", "heads", "kv_heads", "mlp", "vocab"];

  function options(name, values) {
    field(name).replaceChildren(...values.map((value) => new Option(value, value)));
  }

  function fillModel() {
    const model = MODELS[field("model").value];
    if (!model) return;
    const all = { kv_heads: model.heads, mlp: 4 * model.embed, ...model };
    for (const name of [...SIZES, "seq"]) field(name).value = all[name];
    field("llama").checked = Boolean(model.llama);
  }

  function fillMachine() {
    const machine = MACHINES[field("machine").value];
    if (!machine) return;
    for (const [name, value] of Object.entries(machine)) field(name).value = value;
  }

  function read() {
    const model = Object.fromEntries([...SIZES, "seq"].map((name) => [name, number(name)]));
    model.llama = field("llama").checked;
    const machine = {};
    for (const name of ["devices", "local", "memory", "tflops", "fast", "slow", "rows", "seq"]) {
      machine[name] = number(name);
    }
    machine.attained = number("attained") / 100;
    return { model, machine };
  }

  const gigabytes = (bytes) => `${(bytes / 1e9).toPrecision(3)} GB`;
  const percent = (share) => `${(100 * share).toFixed(0)} %`;

  function cells(kind, texts) {
    const row = document.createElement("tr");
    for (const text of texts) {
      const cell = document.createElement(kind);
      if (text.startsWith("`")) {
        const element = document.createElement("code");
        element.textContent = text.slice(1);
        cell.append(element);
      } else cell.textContent = text;
      row.append(cell);
    }
    return row;
  }

  function row(each) {
    const s = each.state;
    return cells("td", ["`" + code(each.plan),
      `${(100 * each.low).toFixed(0)} to ${percent(each.high)}`,
      gigabytes(s.params + s.gradients + s.optimizer), gigabytes(each.memory),
      each.plan.pipe > 1 ? percent(each.bubble) : "none", String(each.plan.microbatches)]);
  }

  function show() {
    const isValid = (e) => e.value > 0 && e.checkValidity();
    const invalid = [...form.elements].find((e) => e.type === "number" && !isValid(e));
    const verdict = document.getElementById("calculator-verdict");
    const body = document.getElementById("calculator-rows");
    body.replaceChildren();
    if (invalid) {
      const rule = !(invalid.value > 0) ? "give a number above 0"
        : invalid.step === "any" ? `give at most ${invalid.max}` : "give a whole number";
      verdict.textContent = `${invalid.labels[0].textContent.trim()}: ${rule}.`;
      return;
    }
    const { model, machine } = read();
    const { fitting, smallest } = choose(model, machine);
    const size = (countParams(model) / 1e9).toPrecision(3);
    if (fitting.length) {
      verdict.textContent = `${size} B parameters. ${fitting.length} of the ways to spread `
        + "them fit. The best by efficiency without overlap, bytes for each device:";
      body.replaceChildren(...fitting.slice(0, 8).map(row));
    } else if (smallest) {
      verdict.textContent = `${size} B parameters. Nothing fits ${machine.memory} GB. Closest is `
        + `${code(smallest.plan)}, in ${smallest.plan.microbatches} microbatches, with `
        + `${gigabytes(smallest.memory)} a device: take more devices, or fewer rows.`;
    } else {
      verdict.textContent = "No strategy divides: make the rows a multiple of the "
        + "devices, and the sizes of the model multiples of small powers of two.";
    }
  }

  options("model", [...Object.keys(MODELS), "my own"]);
  options("machine", [...Object.keys(MACHINES), "my own"]);
  field("model").value = "Llama 3 8B";
  fillModel();
  fillMachine();
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    if (event.target === field("model")) fillModel();
    else if (event.target === field("machine")) fillMachine();
    else if ([...SIZES, "llama"].includes(event.target.name)) field("model").value = "my own";
    else if (["local", "memory", "tflops", "fast", "slow"].includes(event.target.name)) {
      field("machine").value = "my own";
    }
    show();
  });
  show();
})();
