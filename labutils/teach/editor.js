// Wakes every schedule editor on the page that no earlier copy of this script has taken on.
for (const root of document.querySelectorAll(".lu-editor:not([data-ready])")) {
  root.dataset.ready = "";
  const levels = JSON.parse(root.querySelector('script[type="application/json"]').textContent);

  // The rules: schedule.Board and schedule.simulate, with F = B = W = 1 and messages of `message`. An operation is [kind, stage, micro-batch].
  const name = ([kind, stage, k]) => `${kind}${k}@${stage}`;
  const setUp = (level) => {
    const rows = Array.from({ length: Math.max(...level.place) + 1 }, () => []);
    return { level, rows, ends: new Map(), held: rows.map(() => 0), peaks: rows.map(() => 0) };
  };
  const inputs = (level, [kind, stage, k]) => {
    if (kind === "W") return [["B", stage, k]];
    if (kind === "F") return stage ? [["F", stage - 1, k]] : [];
    return [["F", stage, k], ...(stage + 1 < level.place.length ? [["B", stage + 1, k]] : [])];
  };
  const whyNot = (board, rank, op) => {
    const { kinds, place, m, cap } = board.level;
    const [kind, stage, k] = op;
    const runs = `rank ${rank} runs ${name(op)}`;
    if (!kinds.includes(kind)) return `${runs}: operations of this schedule are ${[...kinds].join(", ")}`;
    if (stage < 0 || stage >= place.length) return `${runs}: stages are 0 … ${place.length - 1}`;
    if (k < 0 || k >= m) return `${runs}: micro-batches are 0 … ${m - 1}`;
    if (place[stage] !== rank) return `${runs}, which is rank ${place[stage]}'s`;
    if (board.ends.has(name(op))) return `${runs} twice`;
    for (const needed of inputs(board.level, op))
      if (!board.ends.has(name(needed)))
        return place[needed[1]] === rank ? `${runs} before its own ${name(needed)}` : `${runs} before ${name(needed)} has come from rank ${place[needed[1]]}`;
    if (cap !== null && kind === "F" && board.held[rank] >= cap) return `rank ${rank} holds ${board.held[rank] + 1} activations at ${name(op)}; its limit is ${cap}`;
    return null;
  };
  const play = (board, rank, op) => {
    const row = board.rows[rank];
    const { place, message } = board.level;
    const ready = inputs(board.level, op).map((needed) => board.ends.get(name(needed)) + (place[needed[1]] === rank ? 0 : message));
    const start = Math.max(0, row.length ? row.at(-1).end : 0, ...ready);
    const end = start + (op[0] === "B" && board.level.kinds === "FB" ? 2 : 1);
    row.push({ op, start, end });
    board.ends.set(name(op), end);
    board.held[rank] += (op[0] === "F") - (op[0] === board.level.kinds.at(-1));
    board.peaks[rank] = Math.max(board.peaks[rank], board.held[rank]);
  };
  // MB on a rank now, and at its fullest, where each activation of a stage takes sizes[stage].
  const filled = ({ rows, level }, rank) => {
    let now = 0, most = 0;
    for (const { op } of rows[rank]) {
      now += ((op[0] === "F") - (op[0] === level.kinds.at(-1))) * level.sizes[op[1]];
      most = Math.max(most, now);
    }
    return [now, most];
  };
  const measure = (board) => {
    const { rows, peaks, level } = board;
    const makespan = Math.max(0, ...rows.map((row) => (row.length ? row.at(-1).end : 0)));
    const period = Math.max(0, ...rows.map((row) => (row.length ? row.at(-1).end - row[0].start : 0)));
    const busy = rows.flat().reduce((sum, { start, end }) => sum + end - start, 0);
    const time = level.barrier ? makespan : period;
    const most = level.sizes ? rows.map((_, rank) => filled(board, rank)[1]) : [];
    return { makespan, period, time, peaks, most, bubble: time ? 1 - busy / (time * rows.length) : 0 };
  };
  // What a level asks for: in words, how much at most, and how much it is.
  const goals = (level, { time, peaks, most }) => [
    ["units of time", level.time, time],
    ["as the sum of all peaks", level.total, peaks.reduce((sum, peak) => sum + peak)],
    ["MB on the fullest rank", level.room, Math.max(...most)],
  ].filter(([, most]) => most !== null);
  root.rules = { setUp, whyNot, play, measure };

  // What the reader does: moves are [rank, operation], so that the last one can be taken back.
  const make = (tag, attributes, ...children) => {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  let moves = [], current = 0, board;
  const size = () => board.level.m * board.level.kinds.length * board.level.place.length;
  const stagesOf = (rank) => board.level.place.flatMap((owner, stage) => (owner === rank ? [stage] : []));
  const next = (rank, kind, stage) => [kind, stage, board.rows[rank].filter(({ op }) => op[0] === kind && op[1] === stage).length];
  const options = (rank) => stagesOf(rank).flatMap((stage) => [...board.level.kinds].map((kind) => next(rank, kind, stage)));
  const stuck = () => board.rows.every((_, rank) => options(rank).every((op) => whyNot(board, rank, op)));
  const short = (op) => (board.level.place.length > board.rows.length ? name(op) : op[0] + op[2]);
  const order = (rank) => board.rows[rank].map(({ op }) => name(op)).join(" ");

  const top = root.querySelector(".lu-top");
  const select = top.querySelector("select");
  const task = make("p", {});
  const area = make("div", { class: "lu-board", role: "group", "aria-label": "Ranks", tabindex: 0 });
  const said = make("p", { class: "lu-said", role: "status" });
  const result = make("div", {});
  const button = (text, title, act) => {
    const made = make("button", { type: "button", title }, text);
    made.addEventListener("click", act);
    return made;
  };
  const undo = () => {
    const taken = moves.pop();
    replay();
    tell(taken ? `Taken back: ${short(taken[1])} of rank ${taken[0]}.` : "Nothing to take back.");
  };
  const clear = () => { moves = []; replay(); tell("The board is empty."); };
  const put = (rank, op) => {
    current = rank;
    const reason = whyNot(board, rank, op);
    if (reason) { draw(); return tell(`No: ${reason}.`, "lu-no"); }
    moves.push([rank, op]);
    play(board, rank, op);
    draw();
    if (moves.length === size()) return finish();
    if (stuck()) return tell("No move is left: every rank waits, or its memory is full. Take moves back.", "lu-no");
    const { time } = measure(board);
    tell(`Rank ${rank}: ${short(op)}. ${moves.length} of ${size()} operations, ${time} units of time so far.`);
  };
  const tell = (text, mood = "") => { said.textContent = text; said.className = `lu-said ${mood}`; };
  const percent = (share) => `${Math.round(100 * share)}%`;
  const finish = () => {
    const { level } = board;
    const found = measure(board);
    const { time, peaks, bubble } = found;
    const known = level.known[board.rows.map((_, rank) => order(rank)).join(" | ")];
    const what = level.barrier ? "with a barrier" : "without a barrier";
    const numbers = `${time} per step, bubble fraction (idle/total, ${what}) ${percent(bubble)}, ranks hold ${peaks.join(", ")}`;
    const asked = goals(level, found);
    const missed = asked.filter(([, most, is]) => is > most).map(([of, most, is]) => `${is} ${of} where ${most} ${most === 1 ? "is" : "are"} asked`);
    const best = `${level.best}: ${level.time} per step, ranks hold ${level.peaks.join(", ")}`;
    const verdict = missed.length
      ? `Goal missed: ${missed.join(", ")}. Best known here: ${best}.`
      : `Goal reached${time < level.time ? `, and shorter than ${best}` : ""}.`;
    tell(`${known ? `You built ${known}` : "An order without a name"}: ${numbers}. ${verdict}`, missed.length ? "" : "lu-done");
    const chosen = select.selectedIndex, after = select.options[chosen + 1];
    if (!missed.length) select.options[chosen].text = `${level.title} ✓`;
    const on = !missed.length && after ? [button(`Next level: ${after.text}`, "", () => { select.selectedIndex = chosen + 1; start(); select.focus(); })] : [];
    const line = board.rows.map((row) => row.map(({ op }) => short(op)).join(" ")).join(" | ");
    const field = root.closest(".lu-live")?.querySelector("input[type=text]");
    if (field) {
      field.value = line;
      field.dispatchEvent(new Event("input", { bubbles: true }));
    }
    const real = field ? "the button below runs it on ranks" : "with a kernel, a button below runs it on ranks";
    result.replaceChildren(
      ...on,
      make("p", {}, `In Python, ready for pipeline.run; ${real}:`),
      make("code", { class: "lu-line", tabindex: 0 }, `mine = schedule.read("${line}")`),
    );
  };
  const replay = () => {
    board = setUp(levels[+select.value]);
    for (const [rank, op] of moves) play(board, rank, op);
    draw();
  };
  const draw = () => {
    const focused = document.activeElement?.dataset?.key;
    const unit = 20;
    const length = Math.max(board.level.time + 4, measure(board).makespan);
    const rows = board.rows.map((row, rank) => {
      const keys = options(rank).map((op) => {
        const reason = whyNot(board, rank, op);
        const made = button(short(op), reason ?? `place ${short(op)} on rank ${rank}`, () => put(rank, op));
        made.classList.add(`lu-${op[0]}-key`);
        made.ariaDisabled = reason !== null;
        made.dataset.key = `${rank} ${op[0]} ${op[1]}`;
        return made;
      });
      const most = board.level.cap ?? board.held[rank];
      const held = Array.from({ length: most }, (_, i) => make("i", i < board.held[rank] ? {} : { class: "lu-free" }));
      const limit = board.level.cap === null ? "" : ` of ${board.level.cap}`;
      const [mb] = board.level.sizes ? filled(board, rank) : [];
      const bytes = mb === undefined ? [] : [`${mb} of ${board.level.room} MB`];
      const holds = make("span", { class: "lu-held", role: "img", "aria-label": `holds ${board.held[rank]}${limit}` }, ...held);
      const boxes = row.map(({ op, start, end }) => {
        const second = stagesOf(rank).indexOf(op[1]) > 0 ? " lu-second" : "";
        return make("span", { class: `lu-${op[0]}${second}`, style: `left:${start * unit}px;width:${(end - start) * unit}px` }, `${op[2]}`);
      });
      const lane = make("div", { class: "lu-lane", role: "img", "aria-label": `rank ${rank}: ${order(rank) || "idle"}`, style: `width:${length * unit}px` }, ...boxes);
      return make("div", { class: "lu-rank", "aria-current": rank === current }, make("div", { class: "lu-keys" }, `rank ${rank}`, ...keys, holds, ...bytes), lane);
    });
    area.replaceChildren(...rows);
    if (moves.length < size()) result.replaceChildren();
    if (focused) area.querySelector(`[data-key="${focused}"]`)?.focus({ preventScroll: true });
  };
  root.addEventListener("keydown", (event) => {
    if (event.target === select || event.ctrlKey || event.metaKey || event.altKey) return;
    const letter = event.key.toUpperCase();
    const stage = stagesOf(current)[event.shiftKey ? 1 : 0];
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      current = (current + (event.key === "ArrowDown" ? 1 : -1) + board.rows.length) % board.rows.length;
      draw();
      tell(`Rank ${current}.`);
    } else if (event.key === "Backspace") undo();
    else if (letter.length === 1 && "FBW".includes(letter)) {
      if (!board.level.kinds.includes(letter)) tell("No: this board has no W. Its B is the whole backward pass.", "lu-no");
      else if (stage === undefined) tell(`No: rank ${current} has one stage, and Shift is for the second.`, "lu-no");
      else put(current, next(current, letter, stage));
    }
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  select.addEventListener("change", () => start());
  const start = () => {
    moves = [];
    current = 0;
    replay();
    const { level } = board;
    const limit = level.cap === null ? "" : ` A rank may hold ${level.cap} activations at once.`;
    const bytes = level.sizes ? ` An activation takes ${level.sizes.join(", ")} MB in stages 0 to ${level.sizes.length - 1}.` : "";
    const asked = goals(level, measure(board)).map(([of, most]) => `${most} ${of}`).join(", and at most ");
    task.textContent = `${level.task}${limit}${bytes} Goal: ${asked}.`;
    tell("Beside each rank stand its next operations: click one. What cannot run yet is dashed; click it, and it says why.");
  };
  top.append(button("Take back", "the last move (Backspace)", undo), button("Clear", "all moves", clear));
  const help = make("p", { class: "lu-help" }, "Keys: ↑ ↓ choose a rank; F, B, W place its next operation, with Shift that of its second chunk; Backspace takes back.");
  top.after(task, area, said, result, help);
  root.querySelector(".lu-off").hidden = true;
  top.hidden = false;
  start();
}
