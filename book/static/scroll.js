// What scrolls can be scrolled by keyboard, too: a box that is too small for what it holds takes the focus.
(() => {
  const kinds = ["figure", ".lu-frame", ".math", "mjx-container", "pre", ".text_html"];
  const wanted = kinds.map(kind => `article ${kind}`).join();
  const update = () => {
    for (const box of document.querySelectorAll(wanted)) {
      const scrolls = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
      const can = /auto|scroll/.test(getComputedStyle(box).overflow);
      if (scrolls && can && box.tabIndex < 0) box.tabIndex = 0;
    }
  };
  addEventListener("load", () => {
    update();
    window.MathJax?.startup?.promise?.then(update);  // formulas come later
  });
  addEventListener("resize", update);  // the theme takes focus away from what fits, and looks again a third of a second later
})();
