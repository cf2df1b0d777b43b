// Plays the frames of every animation on the page that no earlier copy of this script has taken on.
for (const player of document.querySelectorAll(".lu-player:not([data-ready])")) {
  player.dataset.ready = "";
  const frames = [...player.querySelectorAll(".lu-frame")];
  const last = frames.length - 1;
  let now = 0, timer = null;

  const make = (tag, attributes) => Object.assign(document.createElement(tag), attributes);
  const button = (text, title, act) => make("button", { type: "button", textContent: text, ariaLabel: title, onclick: act });
  const show = (step) => {
    now = Math.min(Math.max(step, 0), last);
    frames.forEach((frame, i) => (frame.hidden = i !== now));
    slider.value = now;
    slider.ariaValueText = frames[now].querySelector("p").textContent;
  };
  const pause = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = play.ariaLabel = "Play";
  };
  const go = (step) => { pause(); show(step); };
  const start = () => {
    show(now === last ? 0 : now + 1);
    play.textContent = play.ariaLabel = "Pause";
    timer = setInterval(() => (now === last || !player.isConnected ? pause() : show(now + 1)), 1400);
  };

  const play = button("Play", "Play", () => (timer ? pause() : start()));
  const slider = make("input", { type: "range", min: 0, max: last, value: 0, ariaLabel: "Step", oninput: () => go(+slider.value) });
  const controls = make("div", { className: "lu-controls" });
  controls.append(play, button("◀", "Previous step", () => go(now - 1)), button("▶", "Next step", () => go(now + 1)), slider);
  controls.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    go(now + step);
  });
  player.append(controls);
  show(0);
}
