// The layer grid: one row per layer with its choices, who holds which part of its weight, and the boxing before it.
// Python owns the state. It sends `view`, which draw_grid.js draws; this file reports what the user asks for as messages:
//   {event: "parallel" | "split" | "stage", layers: [...], value}, {event: "fix", layer, value},
//   {event: "undo" | "redo" | "run"}, {event: "theme", value: "light" | "dark"}

class Grid {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.layer = null; // the selected row, the last one reached
    this.selection = new Set();
    this.control = 0;
    root.addEventListener("click", (event) => this.onClick(event));
    root.addEventListener("change", (event) => this.onChange(event));
    root.addEventListener("keydown", (event) => this.onKey(event));
    this.draw();
  }

  get view() {
    return this.model.get("view");
  }

  rows() {
    return [...this.root.querySelectorAll(".wb-row[data-layer]")];
  }

  draw() {
    const hadFocus = this.root.contains(document.activeElement);
    const scroll = this.root.querySelector(".wb-rows")?.scrollTop ?? 0;
    drawGrid(this.root, this.view);
    this.root.querySelector(".wb-rows").scrollTop = scroll;
    this.mark(hadFocus);
  }

  // The grid is one tab stop: exactly one of its controls can be reached with Tab.
  mark(focus) {
    const rows = this.rows();
    if (!rows.length) return;
    const current = rows.find((row) => row.dataset.layer === this.layer) ?? rows[0];
    for (const row of rows) row.classList.toggle("selected", this.selection.has(row.dataset.layer));
    const groups = current.querySelectorAll(".wb-seg");
    const group = groups[Math.min(this.control, groups.length - 1)];
    const target = group.querySelector(".on") ?? group.querySelector(".wb-opt");
    for (const option of this.root.querySelectorAll(".wb-opt[tabindex='0']")) option.tabIndex = -1;
    target.tabIndex = 0;
    if (focus) target.focus({ preventScroll: false });
  }

  send(event, more = {}) {
    this.model.send({ event, ...more });
  }

  choose(event, value) {
    const layers = this.selection.has(this.layer) ? [...this.selection] : [this.layer];
    this.send(event, { layers, value: event === "stage" ? Number(value) : value });
  }

  select(layer, extend) {
    if (!extend) this.selection.clear();
    this.selection.add(layer);
    this.layer = layer;
  }

  onClick(event) {
    const target = event.target.closest("[data-event], .wb-row[data-layer]");
    if (!target) return;
    if (target.dataset.event === "fix") {
      this.send("fix", { layer: target.dataset.layer, value: target.dataset.value });
      return;
    }
    const row = target.closest(".wb-row");
    if (!this.selection.has(row.dataset.layer) || !target.dataset.event) this.select(row.dataset.layer, event.shiftKey);
    this.layer = row.dataset.layer;
    if (target.dataset.event && target.tagName === "SELECT") return; // its change event follows
    if (target.dataset.event) {
      this.control = [...row.querySelectorAll(".wb-seg")].indexOf(target.closest(".wb-seg"));
      this.choose(target.dataset.event, target.dataset.value);
    }
    this.mark(true);
  }

  onChange(event) {
    this.layer = event.target.closest(".wb-row").dataset.layer;
    this.choose("stage", event.target.value);
  }

  onKey(event) {
    const handled = event.ctrlKey || event.metaKey ? this.onControlKey(event) : this.onPlainKey(event);
    event.stopPropagation(); // while the grid has the focus its keys never reach the notebook
    if (handled) event.preventDefault();
  }

  onControlKey(event) {
    if (event.key.toLowerCase() !== "z") return false;
    this.send(event.shiftKey ? "redo" : "undo");
    return true;
  }

  onPlainKey(event) {
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (!this.layer) this.select(this.rows()[0]?.dataset.layer, false);
    if (key === "ArrowUp" || key === "ArrowDown") return this.move(key === "ArrowDown" ? 1 : -1, event.shiftKey);
    if (key === "ArrowLeft" || key === "ArrowRight") return this.step(key === "ArrowRight" ? 1 : -1);
    if (key === "d" || key === "m") return this.set("parallel", key === "d" ? "data" : "model");
    if (/^[0-9]$/.test(key)) return this.set("stage", Number(key));
    if (key === "Enter" && event.altKey) return this.set("run");
    if (key === "Enter") return this.set("split");
    if (key === "e") return this.nextProblem();
    return false;
  }

  set(event, value) {
    if (event === "run") this.send("run");
    else this.choose(event, value);
    return true;
  }

  move(by, extend) {
    const rows = this.rows();
    const at = rows.findIndex((row) => row.dataset.layer === this.layer);
    const next = rows[Math.min(Math.max(at + by, 0), rows.length - 1)];
    this.select(next.dataset.layer, extend);
    this.mark(true);
    return true;
  }

  // Left and right run through the values of the choice, then through those of the stage.
  step(by) {
    const row = this.rows().find((candidate) => candidate.dataset.layer === this.layer);
    const options = [...row.querySelectorAll(".wb-opt")];
    const at = options.indexOf(document.activeElement);
    const next = options[at + by];
    if (!next) return true;
    const group = next.closest(".wb-seg");
    const sameGroup = group === options[at]?.closest(".wb-seg");
    this.control = [...row.querySelectorAll(".wb-seg")].indexOf(group);
    if (sameGroup) this.choose(next.dataset.event, next.dataset.value);
    this.mark(true);
    return true;
  }

  nextProblem() {
    const rows = this.rows();
    const at = rows.findIndex((row) => row.dataset.layer === this.layer);
    const order = [...rows.slice(at + 1), ...rows.slice(0, at + 1)];
    const row = order.find((candidate) => candidate.classList.contains("bad"));
    if (!row) return false;
    this.select(row.dataset.layer, false);
    this.mark(true);
    return true;
  }
}

// Plotly cannot read style sheets, so Python is told which theme the page has.
function watchTheme(model) {
  const theme = () => {
    const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
    const dark = jpThemeLight === "false" || (vscodeThemeKind ?? "").includes("dark");
    return dark ? "dark" : "light";
  };
  const report = () => model.send({ event: "theme", value: theme() });
  const observer = new MutationObserver(report);
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
  report();
  return () => observer.disconnect();
}

function render({ model, el }) {
  el.classList.add("wb-grid-host");
  const root = make("div", { class: "wb-grid", role: "grid", "aria-label": "strategy, one row per layer" });
  el.append(root);
  const grid = new Grid(model, root);
  const redraw = () => grid.draw();
  model.on("change:view", redraw);
  const stopWatching = watchTheme(model);
  return () => {
    model.off("change:view", redraw);
    stopWatching();
  };
}

export default { render };
