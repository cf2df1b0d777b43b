// Wakes every panel on the page that no earlier copy of this script has taken on.
for (const panel of document.querySelectorAll(".lu-explore:not([data-ready])")) {
  panel.dataset.ready = "";
  const data = JSON.parse(panel.querySelector('script[type="application/json"]').textContent);
  const view = panel.querySelector(".lu-view");
  const note = panel.querySelector(".lu-note");

  const make = (tag, attributes, ...children) => {
    const made = Object.assign(document.createElement(tag), attributes);
    made.append(...children);
    return made;
  };

  // Each builder returns [element, function that reads the place].
  const build = {
    slider({ label, labels, start }) {
      const readout = make("output", { textContent: labels[start] });
      const input = make("input", { type: "range", min: 0, max: labels.length - 1, value: start });
      const tell = () => {
        readout.textContent = labels[+input.value];
        input.ariaValueText = readout.textContent;
      };
      input.addEventListener("input", tell);
      tell();
      return [make("label", {}, label, input, readout), () => +input.value];
    },
    choice({ label, labels, start }) {
      const input = make("select", {}, ...labels.map((text, i) => make("option", { value: i, textContent: text })));
      input.value = start;
      return [make("label", {}, label, input), () => +input.value];
    },
    checkbox({ label, start }) {
      const input = make("input", { type: "checkbox", checked: start === 1 });
      return [make("label", {}, input, label), () => +input.checked];
    },
    bits({ label, fields, start, free }) {
      const digits = [...start];
      let place = 0;
      const groups = fields.map(([field, width, color]) => {
        const buttons = Array.from({ length: width }, (_, k) => {
          const here = place++;
          const button = make("button", { type: "button", disabled: here >= free });
          const tell = () => {
            button.textContent = digits[here];
            button.style.background = digits[here] === "1" ? color : "#fff";
            button.ariaPressed = digits[here] === "1";
            button.ariaLabel = `${field} bit ${width - 1 - k}`;
          };
          button.addEventListener("click", () => {
            digits[here] = digits[here] === "1" ? "0" : "1";
            tell();
            update();
          });
          tell();
          return button;
        });
        const group = make("div", { className: "lu-field" }, make("span", { textContent: field }), ...buttons);
        group.style.borderColor = color;
        return group;
      });
      return [make("fieldset", {}, make("legend", { textContent: label }), ...groups),
              () => parseInt(digits.slice(0, free).join("") || "0", 2)];
    },
  };

  const views = new Response(
    new Blob([Uint8Array.from(atob(data.views), (c) => c.charCodeAt(0))]).stream().pipeThrough(new DecompressionStream("deflate"))
  ).json();
  const sizes = data.controls.map((c) => (c.kind === "bits" ? 2 ** c.free : c.kind === "checkbox" ? 2 : c.labels.length));
  const update = async () => {
    const state = readers.reduce((sum, read, i) => sum * sizes[i] + read(), 0);
    view.style.minHeight = `${view.offsetHeight}px`; // so that the page does not jump under the reader's hand
    view.innerHTML = (await views)[data.index[state]];
  };
  const built = data.controls.map((control) => build[control.kind](control));
  const readers = built.map(([, read]) => read);
  const inputs = panel.querySelector(".lu-inputs");
  inputs.append(...built.map(([element]) => element));
  inputs.addEventListener("input", update);
  note.textContent = data.note;
  note.hidden = !data.note;
}
