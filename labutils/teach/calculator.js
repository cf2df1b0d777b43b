// Wakes every memory calculator on the page that no earlier copy of this script has taken on. All amounts are BigInt: bytes are exact.
for (const root of document.querySelectorAll(".lu-calculator:not([data-ready])")) {
  root.dataset.ready = "";
  const form = root.querySelector("form");
  const field = (name) => form.elements.namedItem(name);
  const wrong = root.querySelector(".lu-wrong");
  const result = root.querySelector(".lu-result");
  const packed = JSON.parse(root.querySelector('script[type="application/json"]').textContent);

  const make = (tag, attributes, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const grouped = (number) => number.toString().replace(/\B(?=(\d{3})+$)/g, ",");
  // Three significant digits, as labutils.units.text writes them.
  const text = (amount) => {
    const size = Number(amount < 0n ? -amount : amount);
    if (size < 1000) return `${amount} B`;
    const [digits, power] = size.toExponential(2).split("e").map(Number);
    const step = Math.min(Math.floor(power / 3), 7);
    const value = (digits * 10 ** (power - 3 * step)).toFixed(Math.max(2 - (power - 3 * step), 0));
    return `${amount < 0n ? "-" : ""}${value} ${["", "k", "M", "G", "T", "P", "E", "Z"][step]}B`;
  };

  // A formula such as "34Lbsh − 8bs²/N": [factor, [[letter, power], …], is a share] for each product.
  const parsed = new Map();
  const parse = (formula) => {
    if (!parsed.has(formula)) {
      const terms = [...formula.matchAll(/(−?) ?(\d+)([^ /]*)(\/N)?/g)].map(([, sign, factor, product, share]) => [
        BigInt(factor) * (sign ? -1n : 1n),
        [...product.matchAll(/([A-Za-zΨ])([²³]?)/g)].map(([, letter, power]) => [letter, power]),
        share !== undefined,
      ]);
      parsed.set(formula, terms);
    }
    return parsed.get(formula);
  };
  const powers = { "": 1n, "²": 2n, "³": 3n };
  // Of a share each tensor is rounded up by itself, in each of the L layers.
  const value = (formula, letters, shared = false) =>
    parse(formula).reduce((sum, [factor, product, share]) => {
      let [times, size] = [factor, 1n];
      for (const [letter, power] of product) letter === "L" ? (times *= letters.L) : (size *= letters[letter] ** powers[power]);
      return sum + times * (share || shared ? (size + letters.N - 1n) / letters.N : size);
    }, 0n);
  const putIn = (formula, letters) =>
    parse(formula)
      .map(([factor, product, share], i) => {
        const sign = factor < 0n ? (i ? " − " : "−") : i ? " + " : "";
        return sign + [grouped(factor < 0n ? -factor : factor), ...product.map(([letter, power]) => grouped(letters[letter]) + power)].join(" · ") + (share ? ` / ${grouped(letters.N)}` : "");
      })
      .join("");

  // What the fields say, or an error for the reader.
  const problem = (name, message) => Object.assign(new Error(message), { field: name });
  const whole = (name, what, least) => {
    const given = field(name).value.trim();
    if (!/^[-−]?\d[\d, _]*$/.test(given)) throw problem(name, `The ${what} must be a whole number, not “${given}”.`);
    const number = BigInt(given.replace(/[, _]/g, "").replace("−", "-"));
    if (number < BigInt(least)) throw problem(name, `The ${what} must be at least ${least}, not ${given}.`);
    if (number > 10n ** 12n) throw problem(name, `The ${what} must be at most 1,000,000,000,000, not ${given}.`);
    return number;
  };
  const read = (data) => {
    const model = data.models[field("model").value];
    const letters = {};
    for (const [letter, what] of Object.entries(data.shape)) letters[letter] = whole(letter, what, 1);
    letters.b = whole("b", "micro-batch", 1);
    letters.s = whole("s", "sequence length", 2);
    letters.N = whole("devices", "number of devices", 1);
    const given = field("room").value.trim();
    const room = Number(given.replace(",", "."));
    if (!(room > 0 && room < 1e9)) throw problem("room", `The memory of a device must be a number of GB above 0, not “${given}”.`);
    const { L, a, g, d } = letters;
    const { longest, layers, heads, groups, grouped: shared, rope } = model;
    if (longest !== null && letters.s > BigInt(longest))
      throw problem("s", `This model has learned ${grouped(longest)} positions and takes no longer sequence: ${grouped(letters.s)} tokens are too many.`);
    if (layers === null ? L < 3n : L !== BigInt(layers)) throw problem("L", `The formulas of this model are for ${layers ?? "3 or more"} layers, not ${L}.`);
    if (a % g) throw problem("g", `${g} key–value heads do not divide ${a} heads: choose a divisor of ${a}.`);
    if (a > 1n !== heads || g > 1n !== groups || g < a !== shared) {
      const kind = !heads ? "one head" : !shared ? "as many key–value heads as heads" : groups ? "fewer key–value heads than heads, but two or more" : "one key–value head";
      throw problem("g", `The formulas of this model are for ${kind}, not for a = ${a} and g = ${g}: start from a model of that kind.`);
    }
    if (rope && d % 2n) throw problem("d", `A head of width ${d} is odd: RoPE turns pairs of numbers.`);
    const mesh = readMesh(model, letters);
    return { model, letters, mesh, room: BigInt(Math.round(room * 1e9)), zero: letters.N * mesh.cp > 1n ? +field("zero").value : 0 };
  };
  const readMesh = ({ tied, dropout, rope }, { L, a, g, f, v, s, N }) => {
    const [pp, cp, tp, m] = [["pp", "pipeline stages"], ["cp", "ranks of a sequence"], ["tp", "ranks of a layer"], ["m", "number of micro-batches"]].map(([name, what]) => whole(name, what, 1));
    const [stage, sequence] = [whole("stage", "rank of the pipeline", 0), field("sequence").value === "1"];
    const schedule = pp > 1n ? field("schedule").selectedOptions[0].textContent : "1F1B";
    const chunks = schedule === "interleaved" ? whole("chunks", "number of chunks", 1) : 1n;
    const mesh = { pp, cp, tp, m, stage, sequence, schedule, chunks, more: pp * cp * tp > 1n };
    if (!mesh.more) return mesh;
    const [first, chosen] = ["precision", "checkpointing"].map((name) => field(name).selectedOptions[0].textContent);
    const refused = (name, wrong, message) => {
      if (wrong) throw problem(name, `${message} “predict.activations” in labutils runs a rank dry, and “python -m labutils.planner” ranks plans.`);
    };
    refused("precision", first.includes("autocast"), "Half copies of autocast have no formula beyond data parallelism.");
    refused("checkpointing", dropout && chosen !== "none", "The masks of dropout that are computed again have no formula beyond data parallelism.");
    for (const [letter, size] of Object.entries({ a, f, v })) if (size % tp) throw problem("tp", `tp = ${tp} does not divide ${letter} = ${grouped(size)}: choose a divisor, or pad it.`);
    if (g % tp && tp % g) throw problem("tp", `tp = ${tp} neither divides g = ${g} key–value heads nor is a multiple.`);
    if (s % (cp > 1n ? 2n * cp : 1n)) throw problem("cp", `${grouped(s)} tokens are not ${2n * cp} equal chunks, two for each of ${cp} ranks: choose a multiple of ${2n * cp}.`);
    if (cp > 1n && +field("attention").value !== 0) throw problem("attention", "A ring of ranks (cp) has fused attention alone.");
    if (cp > 1n && dropout) throw problem("cp", "Keys that travel have no mask for dropout: cp must be 1.");
    if (sequence && (tp === 1n || (s / cp) % tp)) throw problem("sequence", `Sequence parallelism shares the ${grouped(s / cp)} tokens of a rank out over tp: choose a tp above 1 that divides them.`);
    if (L > 10000n) throw problem("L", "At most 10,000 layers are dealt out to ranks.");
    if (pp * chunks > L + 2n) throw problem("pp", `${L} layers fill at most ${L + 2n} stages, not ${pp * chunks}.`);
    if (chunks > 64n) throw problem("chunks", `At most 64 chunks are dealt out to a rank.`);
    refused("m", schedule === "interleaved" && m % pp, `Interleaved takes ${pp} micro-batches in turn, which do not divide ${grouped(m)}.`);
    if (stage >= pp) throw problem("stage", `The ranks of the pipeline are 0 to ${pp - 1n}: there is no rank ${stage}.`);
    if (tied && pp > 1n && N * cp > 1n && field("zero").value === "3") throw problem("zero", "ZeRO 3 would cut a tied embedding differently in the first and the last stage: choose ZeRO 2.");
    return mesh;
  };

  const predict = (data, { model, letters, zero }) => {
    const place = (...names) => names.reduce((all, name) => all * field(name).options.length + +field(name).value, model.kind);
    letters["Ψ"] = value(data.parameters[model.kind], letters);
    letters.P = value(data.parameters[model.kind], letters, true);
    const [held, stepping] = data.states[place("precision", "optimizer") * field("zero").options.length + zero];
    const passes = data.passes[2 * field("zero").options.length * place("precision", "attention", "checkpointing") + 2 * zero + (letters.b > 1n)];
    const amounts = new Map();
    const amount = (number) => {
      if (!amounts.has(number)) amounts.set(number, value(data.formulas[number][2], letters));
      return amounts.get(number);
    };
    const phases = {};
    for (const [phase, event, alive] of [...passes, ...stepping].map((number) => data.moments[number])) {
      const lines = [...held, ...alive];
      const total = lines.reduce((sum, number) => sum + amount(number), 0n);
      if (!(phase in phases) || total > phases[phase].total) phases[phase] = { phase, event, lines, total };
    }
    for (const found of Object.values(phases)) {
      found.lines = found.lines.map((number) => [...data.formulas[number], amount(number)]).filter(([, , , nbytes]) => nbytes);
      found.by = data.components.map((component) => found.lines.reduce((sum, line) => (line[1] === component ? sum + line[3] : sum), 0n));
    }
    return phases;
  };

  // Layers of one of n stages, which are cut so that the longest is short, the head included: labutils.pipeline.cut.
  const layersOf = (stage, L, n, layer, head) => {
    if (n === 1n) return L;
    if (n === L + 2n) return stage > 0n && stage < n - 1n ? 1n : 0n;
    let shortest, found;
    for (let last = 0n; last <= L - n + 1n; last++) {
      const [each, more] = [(L - last) / (n - 1n), (L - last) % (n - 1n)];
      const [middle, end] = [layer * (more ? each + 1n : each), layer * last + head];
      const longest = middle > end ? middle : end;
      if (shortest === undefined || longest <= shortest) [shortest, found] = [longest, stage === n - 1n ? last : stage >= n - 1n - more ? each + 1n : each];
    }
    return found;
  };
  // Fills buckets from the last tensor to the first, as a backward pass does.
  const buckets = (numels, width, most) => {
    const found = [];
    let held = 0n;
    for (const numel of [...numels].reverse()) {
      if (!found.length || held + numel * width > most) [held] = [0n, found.push([])];
      found.at(-1).push(numel);
      held += numel * width;
    }
    return found;
  };
  // Micro-batches in flight of each chunk of a rank, at the moments that can be its fullest: labutils.planner.stages.in_flight.
  const inFlight = ({ pp, m, stage, schedule, chunks: v }) => {
    const [few, after] = [(a, b) => (a < b ? a : b), pp - 1n - stage];
    if (schedule !== "interleaved") return [[schedule === "GPipe" ? m : few(after + 1n, m)]];
    const ahead = few(2n * after + (v - 1n) * pp + 1n, v * m);
    // How many of the first n passes are of a chunk: in rounds of pp after one another.
    const passed = (n, order) => {
      const over = (n % (v * pp)) - order * pp;
      return (n / (v * pp)) * pp + (over < 0n ? 0n : few(over, pp));
    };
    const moments = Number(few(v * pp, v * m - ahead)) + 1;
    return Array.from({ length: moments }, (_, done) => Array.from({ length: Number(v) }, (_, c) => passed(BigInt(done) + ahead, BigInt(c)) - passed(BigInt(done), v - 1n - BigInt(c))));
  };
  // What the first rank of a place on the pipeline holds between the operations of a step: predict.states and predict.activations.
  const hold = (data, { model, letters, zero, mesh }) => {
    const { pp, cp, tp, stage, sequence, chunks } = mesh;
    const { weights, layer, head, kept } = data.inventories[model.kind];
    const [{ half, gradients }, moments] = [data.precisions[field("precision").value], data.optimizers[field("optimizer").value]];
    const [first, last, n] = [stage === 0n, stage === pp - 1n, zero ? letters.N * cp : 1n];
    const parted = Array.from({ length: Number(chunks) }, (_, c) => ({
      first: first && c === 0 ? 1 : 0,
      layers: Number(layersOf(stage + BigInt(c) * pp, letters.L, pp * chunks, value(layer, letters), value(head, letters))),
      last: last && c === Number(chunks) - 1 ? 1 : 0,
    }));
    const L = BigInt(parted.reduce((sum, { layers }) => sum + layers, 0));
    const here = { ...letters, L, a: letters.a / tp, g: letters.g % tp ? 1n : letters.g / tp, f: letters.f / tp, v: letters.v / tp, c: letters.s / cp, t: letters.s / cp / (sequence ? tp : 1n) };

    const units = {}; // numbers of each tensor, by chunk; the ends that are tied are averaged apart
    for (const [c, times] of parted.entries())
      for (const place of Object.keys(times))
        for (let i = 0; i < times[place]; i++)
          for (const [, formula, tied] of weights.filter(([where]) => where === place)) {
            if (tied && place === "last" && first) continue;
            const unit = tied && pp > 1n ? "tied" : zero === 3 && place === "layers" ? `${c} ${i}` : `${c}`;
            (units[unit] ??= []).push(value(formula, here));
          }
    const stream = half ? 2n : 4n;
    const width = zero === 3 ? 4n : stream;
    const flats = Object.values(units).flatMap((unit) => (zero === 1 || zero === 2 ? buckets(unit, width, BigInt(data.bucket)) : [unit]));
    [here["Ψ"], here.P, here.T, here.N] = [0n, 0n, 0n, letters.N * cp];
    for (const flat of flats) {
      const share = (flat.reduce((sum, numel) => sum + numel) + n - 1n) / n;
      here["Ψ"] += share * n;
      here.P += share;
      let start = 0n;
      for (const numel of flat) {
        if (start < share) here.T += 1n;
        start += numel;
      }
    }
    const lines = [["weights", "weights", zero === 3 ? "4P" : `${width}Ψ`]];
    if (zero) lines.push([half && zero < 3 ? "fp32 gradients" : "gradients", "gradients", zero > 1 || (half && !gradients) ? "4P" : "4Ψ"]);
    else {
      if (!(half && gradients === "only")) lines.push(["gradients", "gradients", `${width}Ψ`]);
      if (half && gradients) lines.push(["fp32 gradients", "gradients", "4Ψ"]);
    }
    if (half && zero < 3) lines.push(["master weights", "optimizer", "4P"]);
    for (const name of moments) lines.push([name, "optimizer", "4P"]);
    if (moments.length === 2) lines.push(["step", "optimizer", "4T"]);
    if (model.rope && L) lines.push(["buffers", "buffers", `${width}sd`]);

    const each = { first: [], layers: [], last: [] }; // what one of them keeps of a micro-batch
    const keep = (place, part, formula) => each[place].push([part, formula]);
    const [again, casts] = [field("checkpointing").selectedOptions[0].textContent, zero === 3 && half];
    for (const [place, part, heads, formula] of kept[half ? 0 : 1][field("attention").value][field("checkpointing").value])
      if (!(heads && here.a === 1n)) keep(place, part, formula);
    if (tp > 1n) keep("first", "tokens", "9bc"); // which words are others', and the places of one's own
    if (cp > 1n && !model.rope) keep("first", "positions", "8c");
    keep("last", "outside", `${8n + (tp > 1n ? 4n : stream)}`); // how many targets count
    if (model.rope && casts && again !== "full") keep("layers", "attention.rotary", "4cd"); // halves of tables in fp32
    const size = (place) => each[place].reduce((sum, [, formula]) => sum + value(formula, here), 0n);
    const sizes = parted.map((times) => Object.keys(times).reduce((sum, place) => sum + BigInt(times[place]) * size(place), 0n));
    const flights = inFlight(mesh).map((counts) => [counts.reduce((sum, count, c) => sum + count * sizes[c], 0n), counts]);
    const [, counts] = flights.reduce((most, flight) => (flight[0] > most[0] ? flight : most));
    here.m = last && !first ? counts.at(-1) : counts[0];
    if (chunks > 1n) here.M = counts.reduce((sum, count, c) => sum + count * BigInt(parted[c].layers), 0n);

    const parts = {}; // of each the formula, with m micro-batches in flight
    const often = { first: "$&m", layers: chunks > 1n ? "$&M" : "$&mL", last: "$&m" };
    const add = (part, formula) => (parts[part] = part in parts ? `${parts[part]} + ${formula}` : formula);
    for (const [place, there] of Object.entries({ first, layers: L > 0n, last }))
      if (there) for (const [part, formula] of each[place]) add(part, formula.replace(/\d+/g, often[place]));
    if (model.rope && L && cp > 1n && !casts) add("attention.rotary", `${stream}cd`); // the rows of a rank's tokens
    for (const [part, formula] of Object.entries(parts)) lines.push([part, "activations", formula]);
    const found = { phase: "held", letters: here, flying: counts.reduce((sum, count) => sum + count), lines: lines.map((line) => [...line, value(line[2], here)]).filter(([, , , nbytes]) => nbytes) };
    found.total = found.lines.reduce((sum, line) => sum + line[3], 0n);
    found.by = data.components.map((component) => found.lines.reduce((sum, line) => (line[1] === component ? sum + line[3] : sum), 0n));
    return found;
  };

  // What the reader sees.
  const chip = (component) => make("span", { class: `lu-chip lu-${component}` });
  const share = (part, whole) => `${Number((part * 1000000n) / whole) / 10000}%`;
  const derived = (data, component) => {
    const title = data.sections[component];
    const heading = [...document.querySelectorAll("h1, h2, h3")].find((found) => found.textContent.startsWith(title));
    if (!heading) return component;
    const link = make("a", { href: `#${(heading.closest("section[id]") ?? heading).id}`, title: `derived under “${title}”` }, component);
    link.addEventListener("click", (click) => {
      click.preventDefault();
      heading.scrollIntoView();
    });
    return link;
  };
  let opened = null; // the phase whose ledger is shown; the fullest unless the reader has chosen one
  const open = (phase) => {
    const button = make("button", { type: "button", "data-phase": phase, title: `show what is alive at the fullest moment of this phase` }, phase);
    button.addEventListener("click", () => {
      opened = phase;
      root.update();
      result.querySelector(`[data-phase=${phase}]`).focus();
    });
    return button;
  };
  const bars = (data, phases, room) => {
    const most = Object.values(phases).reduce((most, { total }) => (total > most ? total : most), room);
    const rows = Object.values(phases).map(({ phase, total, by }) => {
      const told = data.components.flatMap((component, i) => (by[i] > 0n ? [`${component} ${text(by[i])}`] : [])).join(", ");
      const parts = data.components.map((component, i) => make("span", { class: `lu-${component}`, style: `width:${share(by[i] > 0n ? by[i] : 0n, most)}` }));
      const limit = make("i", { style: `left:${share(room, most)}` });
      return make("div", { class: "lu-phase" }, where[phase] ? open(phase) : phase, make("div", { class: "lu-bar", role: "img", "aria-label": `${phase}: ${told}` }, ...parts, limit), text(total));
    });
    return make("div", { class: "lu-phases" }, ...rows);
  };
  const table = (data, peak, letters, whole) => {
    const heads = ["what is alive", "bytes", "exactly", "formula, and with the numbers put in"].map((head) => make("th", { scope: "col" }, head));
    const body = data.components.flatMap((component, i) => {
      const lines = peak.lines.filter((line) => line[1] === component);
      if (!lines.length) return [];
      const head = make("th", { scope: "rowgroup" }, chip(component), derived(data, component));
      const row = (name, nbytes, ...rest) => make("tr", { "data-bytes": nbytes }, name, make("td", {}, text(nbytes)), make("td", {}, grouped(nbytes)), ...rest);
      return [
        make("tbody", {}, row(head, peak.by[i], make("td", {})), ...lines.map(([name, , formula, nbytes]) =>
          row(make("th", { scope: "row" }, name), nbytes, make("td", {}, make("code", {}, formula), make("small", {}, /[^\d]/.test(formula) ? putIn(formula, letters) : ""))))),
      ];
    });
    const foot = [whole, text(peak.total), grouped(peak.total), ""].map((cell, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, cell));
    return make("div", { class: "lu-scroll", role: "region", "aria-label": "Lines of the ledger", tabindex: 0 },
      make("table", {}, make("thead", {}, make("tr", {}, ...heads)), ...body, make("tfoot", {}, make("tr", { "data-bytes": peak.total }, ...foot))));
  };
  const where = { forward: "in the forward pass", backward: "in the backward pass", optimizer: "in the optimizer’s step" };
  const show = (data, setting) => {
    const { room, letters, mesh } = setting;
    const phases = mesh.more ? { held: hold(data, setting) } : predict(data, setting);
    const peak = Object.values(phases).reduce((most, phase) => (phase.total > most.total ? phase : most));
    const fails = Object.values(phases).find(({ total }) => total > room);
    const device = field("room").value === field("device").value ? field("device").selectedOptions[0].textContent : "device";
    const ledger = phases[opened] ?? peak;
    const over = text(peak.total - room);
    const said = make("p", { class: "lu-verdict", "data-bytes": peak.total, "data-fits": !fails }, make("strong", {}, text(peak.total)));
    const strong = (verdict) => make("strong", {}, `The ${device} has ${text(room)}: ${verdict}`);
    const shown = peak.letters ?? letters;
    const sizes = Object.entries(shown).filter(([letter]) => mesh.more || letters.N > 1n || !"NP".includes(letter)).map(([letter, size]) => `${letter} = ${grouped(size)}`);
    if (mesh.more) {
      const axes = `Mesh(pp=${mesh.pp}, dp=${letters.N}, cp=${mesh.cp}, tp=${mesh.tp}), rank=${mesh.stage * letters.N * mesh.cp * mesh.tp}`;
      said.append(` between the operations of a step, on the first rank at place ${mesh.stage} of the pipeline (of 0 to ${mesh.pp - 1n}), with at most ${grouped(peak.flying)} ${mesh.chunks > 1n ? `passes of its ${mesh.chunks} chunks` : "micro-batches"} in flight (${mesh.schedule}). `,
        strong(fails ? `this does not fit: ${over} too much.` : `${text(room - peak.total)} are left for what comes and goes.`),
        " What comes and goes has no formula here: ", make("code", {}, `predict.peak(model, train, ${axes})`), " runs it dry, and ", make("code", {}, "python -m labutils.planner"), " ranks whole plans.");
      sizes.push(`letters as they are on this rank: L layers, c tokens of a sequence, t of these between the layers, m micro-batches in flight${mesh.chunks > 1n ? " (of the chunk at an end), M layers of micro-batches in flight" : ""}, Ψ numbers, P its share of them, T tensors in that`);
      if (mesh.pp > 1n) sizes.push("schedules that split backward passes (ZB-H1, ZB-V, DualPipe, …) keep some of this longer and have no formula: predict.activations runs them dry");
    } else {
      const verdict = fails ? `does not fit: ${over} too much, and fails first ${where[fails.phase]}.` : `fits, with ${text(room - peak.total)} to spare.`;
      said.append(` at the fullest moment, ${where[peak.phase]}, after `, make("code", {}, peak.event), ". ", strong(`the step ${verdict}`),
        " Counted are the operations of PyTorch on a CPU; context, kernels and workspaces of a GPU come on top.");
      if (letters.N > 1n) sizes.push("P is Ψ / N, the share of each tensor rounded up");
    }
    if (+field("zero").value && shown.N === 1n) sizes.push("ZeRO shards over devices: on one there is nothing to shard");
    const caption = make("p", { class: "lu-open" }, ...(mesh.more ? ["What is held between the operations:"] : [`What is alive ${where[ledger.phase]}, after `, make("code", {}, ledger.event), ":"]));
    result.replaceChildren(said, bars(data, phases, room), caption, table(data, ledger, shown, ledger === peak && !mesh.more ? "peak" : "total"), make("p", { class: "lu-note" }, sizes.join(" · ")));
  };

  const start = async () => {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const data = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
    const shape = () => {
      for (const [letter, size] of Object.entries(data.models[field("model").value].sizes)) field(letter).value = size;
    };
    const update = () => {
      for (const input of form.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
      try {
        show(data, read(data));
        wrong.textContent = "";
      } catch (error) {
        if (!error.field) throw error;
        field(error.field).setAttribute("aria-invalid", "true");
        field(error.field).closest("details")?.setAttribute("open", "");
        wrong.textContent = error.message;
      }
      result.hidden = wrong.textContent !== "";
    };
    form.addEventListener("submit", (submit) => submit.preventDefault());
    root.update = update;
    form.addEventListener("input", (input) => {
      opened = null;
      const { longest, grouped: shared } = data.models[field("model").value];
      if (input.target.name === "model") {
        shape();
        if (longest !== null && +field("s").value > longest) field("s").value = longest;
      }
      if (input.target.name === "a" && !shared) field("g").value = field("a").value;
      if (input.target.name === "device") field("room").value = field("device").value;
      update();
    });
    shape();
    form.hidden = false;
    update();
  };
  start();
}
