// The panel's tabs: which part is shown, the sign that Run was heard, and the legend behind "?". Which part is shown changes in
// the page at once and reports it to Python: {event: "visible", value, view}.

const BUSY = 1500; // milliseconds after which a click that nobody has answered gets a reason

class Tabs {
  constructor(model, el, panel) {
    this.model = model;
    this.panel = panel;
    this.list = make("div", { class: "wb-tabs", role: "tablist", "aria-label": "parts of the panel" });
    el.append(this.list);
    keepKeys(el);
    this.list.addEventListener("click", (event) => this.choose(event.target.closest("button")?.dataset.tab));
    this.list.addEventListener("keydown", (event) => this.onKey(event));
    this.drawNames();
  }

  drawNames() {
    const hadFocus = this.list.contains(document.activeElement);
    const names = Object.entries(this.model.get("names"));
    this.list.replaceChildren(...names.map(([tab, name]) => make("button", { role: "tab", "data-tab": tab, type: "button" }, name)));
    this.draw(hadFocus);
  }

  draw(focus = false) {
    const chosen = this.model.get("chosen");
    for (const button of this.list.children) {
      const on = button.dataset.tab === chosen;
      button.setAttribute("aria-selected", String(on));
      button.tabIndex = on ? 0 : -1;
      if (on && focus) button.focus({ preventScroll: true });
    }
    this.panel.dataset.tab = chosen;
    this.namePanels();
  }

  namePanels() {
    for (const part of this.panel.querySelectorAll(":scope > .wb-tab")) {
      part.setAttribute("role", "tabpanel");
      part.setAttribute("aria-label", [...part.classList].find((name) => name.startsWith("wb-on-"))?.slice(6) ?? "");
    }
  }

  choose(tab, focus = false) {
    if (!tab) return;
    this.model.set("chosen", tab);
    this.model.save_changes();
    this.draw(focus);
  }

  onKey(event) {
    const buttons = [...this.list.children];
    const at = buttons.findIndex((button) => button.getAttribute("aria-selected") === "true");
    const last = buttons.length - 1;
    const next = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at ? at - 1 : last, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation(); // never reaches the notebook
    this.choose(buttons[next].dataset.tab, true);
  }

  onPanelClick(event) {
    if (event.target.closest(".wb-run:enabled")) this.ask();
    if (event.target.closest(".wb-problem")) this.choose("strategy");
    if (event.target.closest(".wb-legend-button")) this.toggleLegend(event.target.closest("button"));
    else if (!event.target.closest(".wb-legend")) this.closeLegend();
  }

  // Run was pressed: a sign at once, before Python has heard of it.
  ask() {
    this.panel.dataset.asked = "starting";
    this.choose("live");
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => (this.panel.dataset.asked = "busy"), BUSY);
  }

  answer() {
    clearTimeout(this.waiting);
    delete this.panel.dataset.asked;
  }

  toggleLegend(button) {
    if (this.closeLegend()) return;
    const legend = make("div", { class: "wb-legend", role: "dialog", "aria-label": "explain the words of the panel", tabindex: "-1" });
    legend.innerHTML = this.model.get("legend");
    legend.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key !== "Escape") return;
      this.closeLegend();
      button.focus();
    });
    keepKeys(legend);
    button.closest(".wb-stays").append(legend);
    legend.focus({ preventScroll: true });
  }

  closeLegend() {
    const legend = this.panel.querySelector(".wb-legend");
    legend?.remove();
    return Boolean(legend);
  }
}

function serve(model, el, panel) {
  const tabs = new Tabs(model, el, panel);
  const listeners = { "change:chosen": () => tabs.draw(), "change:names": () => tabs.drawNames(), "change:num_answers": () => tabs.answer() };
  for (const [event, listener] of Object.entries(listeners)) model.on(event, listener);
  const click = (event) => tabs.onPanelClick(event);
  panel.addEventListener("click", click);
  const grown = new MutationObserver(() => tabs.namePanels()); // parts come one by one
  grown.observe(panel, { childList: true });
  const stopWatching = watchVisibility(el, ".wb-stays", (event, value, more) => model.send({ event, value, ...more }));
  return () => {
    for (const [event, listener] of Object.entries(listeners)) model.off(event, listener);
    panel.removeEventListener("click", click);
    grown.disconnect();
    clearTimeout(tabs.waiting);
    stopWatching();
  };
}

function render({ model, el }) {
  el.classList.add("wb-tabs-host");
  let stop = () => {};
  let ended = false;
  const begin = () => {
    const panel = el.closest(".wb-panel");
    if (panel && !ended) stop = serve(model, el, panel);
    return panel || ended;
  };
  const frame = () => begin() || requestAnimationFrame(frame); // drawn before its host hangs in the page
  frame();
  return () => {
    ended = true;
    stop();
  };
}

export default { render };
