// The layer grid: one row per layer or group of equal blocks, who holds which part of the weights, and the boxings.
// Python owns the state. It sends `view`, which draw_grid.js draws; this file reports what the user asks for as messages:
//   {event: "choice" | "stage", rows: [...], value}, {event: "fold" | "select", rows: [...]},
//   {event: "fix", row, value}, {event: "find", value}, {event: "tensor"}, {event: "undo" | "redo" | "run"},
//   {event: "theme", value: "light" | "dark"}
// Rows are named by their patterns.

class Grid {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.row = null; // the row that has the focus or had it last
    this.selection = new Set();
    this.control = 0;
    this.headKey = "";
    this.drawn = new Map(); // by key: the nodes of rows that stand in the page
    this.head = make("div", { class: "wb-head-host", role: "rowgroup" });
    this.body = make("div", { class: "wb-body", role: "rowgroup" });
    this.scroller = make("div", { class: "wb-rows" }, this.head, this.body);
    this.foot = make("div", {});
    root.append(this.scroller, this.foot);
    this.scroller.addEventListener("scroll", () => this.onScroll());
    root.addEventListener("click", (event) => this.onClick(event));
    root.addEventListener("dblclick", (event) => this.onDoubleClick(event));
    root.addEventListener("change", (event) => this.onChange(event));
    root.addEventListener("input", (event) => this.onInput(event));
    root.addEventListener("keydown", (event) => this.onKey(event));
    this.draw();
  }

  get view() {
    return this.model.get("view");
  }

  get patterns() {
    return this.view.rows.map((row) => row.pattern);
  }

  // ---- drawing

  draw() {
    const view = this.view;
    const hadFocus = this.body.contains(document.activeElement);
    this.root.style.setProperty("--ranks-width", `${view.ranks_width}px`);
    this.root.style.setProperty("--name-width", `${namesWidth(view.rows)}px`);
    this.root.style.setProperty("--weight-width", `${weightsWidth(view.rows)}px`);
    this.root.style.setProperty("--choice-width", `${choicesWidth(view.rows)}px`);
    this.root.style.setProperty("--stage-width", `${stageWidth(view)}px`);
    this.root.classList.toggle("few", view.stage_options.length < 2);
    this.root.setAttribute("aria-rowcount", view.rows.length + 1);
    const headKey = JSON.stringify([view.stages, view.columns, view.stage_options, view.new_stage, view.boxing_detail, view.find.shown]);
    if (headKey !== this.headKey) this.head.replaceChildren(header(view));
    this.headKey = headKey;
    this.tops = offsets(view.rows);
    this.keepRow();
    this.drawBody();
    const footKey = JSON.stringify([view.total, view.note, view.tensor]);
    if (footKey !== this.footKey) this.foot.replaceChildren(totalLine(view));
    this.footKey = footKey;
    this.mark(hadFocus);
  }

  // A row may be gone (folded, found no more, cut into others): the one that now stands in its place is current.
  keepRow() {
    const patterns = this.patterns;
    if (!patterns.includes(this.row)) {
      const near = patterns.find((pattern) => this.row?.startsWith(`${pattern}.`)) ?? patterns[Math.min(this.index ?? 0, patterns.length - 1)];
      if (this.row !== null) this.row = near ?? null;
    }
    this.index = patterns.indexOf(this.row);
    this.selection = new Set([...this.selection].filter((pattern) => patterns.includes(pattern)));
    if (!this.selection.size && this.row !== null) this.selection.add(this.row);
  }

  drawBody() {
    this.range = windowOf(this.view.rows, this.tops, this.scroller.scrollTop, this.scroller.clientHeight || 520);
    const drawn = new Map();
    const nodes = drawRows(this.view, this.range, this.tops, (key, make) => {
      drawn.set(key, this.drawn.get(key) ?? make());
      return drawn.get(key);
    });
    this.drawn = drawn;
    putChildren(this.body, nodes);
  }

  onScroll() {
    hideTip(this.root);
    const range = windowOf(this.view.rows, this.tops, this.scroller.scrollTop, this.scroller.clientHeight);
    const [first, last] = this.range;
    const shown = [first === 0 ? 0 : first + MARGIN / 2, last === this.view.rows.length ? last : last - MARGIN / 2];
    if (range[0] + MARGIN >= shown[0] && range[1] - MARGIN <= shown[1]) return;
    const hadFocus = this.body.contains(document.activeElement);
    this.drawBody();
    this.mark(hadFocus, true);
  }

  element(pattern) {
    return [...this.body.querySelectorAll(".wb-row[data-row]")].find((row) => row.dataset.row === pattern);
  }

  controls(row) {
    return row ? [...row.querySelectorAll(".wb-seg, .wb-choice, .stage-list")] : [];
  }

  // Of the controls of all rows exactly one can be reached with Tab, and so can the fixes of mistakes.
  mark(focus, quietly = false) {
    for (const row of this.body.querySelectorAll(".wb-row[data-row]")) {
      const on = this.selection.has(row.dataset.row);
      row.classList.toggle("selected", on);
      row.setAttribute("aria-selected", String(on));
    }
    for (const option of this.body.querySelectorAll(".wb-opt[tabindex='0']")) option.tabIndex = -1;
    const current = this.element(this.row) ?? this.body.querySelector(".wb-row[data-row]");
    const controls = this.controls(current);
    const control = controls[Math.min(this.control, controls.length - 1)];
    if (!control) return;
    const target = control.matches(".wb-opt") ? control : control.querySelector(".on") ?? control.querySelector(".wb-opt");
    target.tabIndex = 0;
    if (focus) target.focus({ preventScroll: true });
    if (focus && !quietly) this.reveal(current);
  }

  reveal(row) {
    const top = row.offsetTop - this.head.offsetHeight;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    const bottom = row.offsetTop + row.offsetHeight - this.scroller.clientHeight;
    if (bottom > this.scroller.scrollTop) this.scroller.scrollTop = bottom;
  }

  // ---- messages

  send(event, more = {}) {
    this.model.send({ event, ...more });
  }

  choose(event, value) {
    const rows = this.selection.has(this.row) ? [...this.selection] : [this.row];
    this.send(event, { rows, value: event === "stage" ? Number(value) : value });
  }

  select(pattern, extend = false) {
    if (!extend) this.selection.clear();
    this.selection.add(pattern);
    const changed = this.row !== pattern;
    this.row = pattern;
    this.index = this.patterns.indexOf(pattern);
    if (changed) this.send("select", { rows: [pattern] });
  }

  fold(pattern) {
    this.send("fold", { rows: [pattern] });
  }

  // ---- mouse

  onClick(event) {
    const fix = event.target.closest("button[data-fix]");
    if (fix) return this.send("fix", { row: fix.dataset.of, value: fix.dataset.fix });
    if (event.target.closest(".wb-tensor-link")) return this.send("tensor");
    const row = event.target.closest(".wb-row[data-row]");
    if (!row) return undefined;
    const target = event.target.closest("[data-event], [data-fold], [data-menu]");
    const pattern = row.dataset.row;
    if (!this.selection.has(pattern) || !target) this.select(pattern, event.shiftKey);
    else if (this.row !== pattern) this.select(pattern, true);
    if (target?.tagName === "SELECT") return undefined; // its change event follows
    if (target) this.control = Math.max(0, this.controls(row).indexOf(target.closest(".wb-seg, .wb-choice")));
    if (target?.dataset.fold) this.fold(target.dataset.fold);
    else if (target?.dataset.menu) this.menu(target);
    else if (target) this.choose(target.dataset.event, target.dataset.value);
    return target?.dataset.menu ? undefined : this.mark(true);
  }

  onDoubleClick(event) {
    const option = event.target.closest(".choice .wb-opt");
    if (option) this.menu(option);
  }

  onChange(event) {
    if (event.target.dataset.event !== "stage" || event.target.value === "") return;
    const pattern = event.target.closest(".wb-row").dataset.row;
    if (!this.selection.has(pattern)) this.select(pattern);
    this.choose("stage", event.target.value);
  }

  onInput(event) {
    if (!event.target.matches(".wb-find")) return;
    clearTimeout(this.finding);
    const { value } = event.target;
    this.finding = setTimeout(() => this.send("find", { value }), 120);
  }

  // The ways to split a weight, below a row's choice.
  menu(anchor) {
    const row = this.view.rows[this.index];
    const current = row.choice_text;
    const items = [
      ["data", "data", "whole weight, batch split"],
      ["model", "model", "split chosen by its neighbours"],
      ["model:column", "model:column", "output features, S(0) of a linear weight"],
      ["model:row", "model:row", "input features, S(1); gives a sum"],
    ];
    if (row.experts.length) {
      const over = row.experts.map((ranks) => [`expert:${ranks}`, `expert:${ranks}`, `whole experts over ${ranks} ranks`]);
      items.splice(1, 3, ["model", "model", "whole experts over the model axis"], ...over);
    }
    openMenu(this.root, anchor, items, current, (value) => this.choose("choice", value), () => this.mark(true));
  }

  // ---- keys

  onKey(event) {
    if (event.target.closest(".wb-menu")) return;
    if (event.target.matches(".wb-find")) {
      event.stopPropagation();
      if (event.key === "ArrowDown") this.mark(true);
      return;
    }
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
    if (key === "Tab" || (event.target.matches("button.fix") && (key === "Enter" || key === " "))) return false;
    if (!this.row) this.select(event.target.closest(".wb-row[data-row]")?.dataset.row ?? this.patterns[0]);
    if (key === "Escape") return hideTip(this.root);
    if (key === "ArrowUp" || key === "ArrowDown") return this.move(key === "ArrowDown" ? 1 : -1, event.shiftKey);
    if (key === "Home" || key === "End") return this.move(key === "End" ? this.patterns.length : -this.patterns.length);
    if (key === "ArrowLeft" || key === "ArrowRight") return this.step(key === "ArrowRight" ? 1 : -1);
    const parallel = { d: "data", m: "model", x: "expert" }[key];
    if (parallel) return parallel === "expert" && !this.view.rows[this.index].experts.length ? true : this.set("choice", parallel);
    if (/^[0-9]$/.test(key)) return this.view.stage_options.includes(Number(key)) ? this.set("stage", Number(key)) : true;
    if (key === "Enter" && event.altKey) return this.set("run");
    if (key === "Enter" || key === "+" || key === "-") return this.open(key);
    if (key === "e") return this.nextProblem();
    return false;
  }

  set(event, value) {
    if (event === "run") this.send("run");
    else this.choose(event, value);
    return true;
  }

  open(key) {
    const row = this.view.rows[this.index];
    if (row.open !== null && (key === "Enter" || (key === "+") !== row.open)) this.fold(row.pattern);
    else if (row.open === null && key === "Enter") this.menu(this.controls(this.element(row.pattern))[0]);
    return true;
  }

  move(by, extend = false) {
    const last = this.patterns.length - 1;
    const next = Math.min(Math.max(this.index + by, 0), last);
    this.select(this.patterns[next], extend);
    this.show(next);
    this.mark(true);
    return true;
  }

  // Brings a row into the page when it is not among those that are drawn.
  show(index) {
    if (index >= this.range[0] && index < this.range[1]) return;
    this.scroller.scrollTop = Math.max(0, this.tops[index] - this.scroller.clientHeight / 2);
    this.drawBody();
  }

  // Left and right run through the values of the choice, then through those of the stage.
  step(by) {
    const row = this.element(this.row);
    const options = [...row.querySelectorAll(".wb-opt")];
    const at = options.indexOf(document.activeElement);
    const next = options[at + by];
    if (!next) return true;
    const group = next.closest(".wb-seg");
    const sameGroup = group !== null && group === options[at]?.closest(".wb-seg");
    this.control = this.controls(row).indexOf(group ?? next);
    if (sameGroup) this.choose(next.dataset.event, next.dataset.value);
    this.mark(true);
    return true;
  }

  nextProblem() {
    const rows = this.view.rows;
    for (let by = 1; by <= rows.length; by += 1) {
      const index = (Math.max(this.index, -1) + by + rows.length) % rows.length;
      if (!rows[index].mistakes.length) continue;
      this.select(rows[index].pattern);
      this.control = rows[index].bad === "stage" ? 1 : 0;
      this.show(index);
      this.mark(true);
      return true;
    }
    return false;
  }
}

function render({ model, el }) {
  el.classList.add("wb-grid-host");
  const root = make("div", { class: "wb-grid", role: "treegrid", "aria-label": "strategy, one row per layer" });
  el.append(root);
  keepKeys(root);
  const grid = new Grid(model, root);
  const redraw = () => grid.draw();
  model.on("change:view", redraw);
  const stopWatching = watchTheme((event, value) => grid.send(event, { value }));
  const stopServing = servePanel(root, grid);
  return () => {
    model.off("change:view", redraw);
    stopWatching();
    stopServing();
  };
}

export default { render };
