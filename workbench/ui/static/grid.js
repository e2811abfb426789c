// The layer grid: one row per layer with its choices, who holds which part of its weight, and the boxing before it.
// Python owns the state. It sends `view`; this file draws it and reports what the user asks for as small messages:
//   {event: "parallel" | "split" | "stage", layers: [...], value}, {event: "fix", layer, value},
//   {event: "undo" | "redo" | "run"}, {event: "theme", value: "light" | "dark"}

const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function stageColour(stage, shade = 0) {
  return `var(--wb-stage-${stage % 4}${shade % 2 ? "-second" : ""})`;
}

// ---- cells -----------------------------------------------------------------------------------------------------

function segment(label, options, css) {
  const group = make("span", { class: `wb-seg ${css}`, role: "radiogroup", "aria-label": label });
  for (const option of options) {
    const on = option.on ? " on" : "";
    const bad = option.on && option.bad ? " bad" : "";
    const attributes = {
      class: `wb-opt${on}${bad}`,
      role: "radio",
      "aria-checked": String(Boolean(option.on)),
      tabindex: "-1",
      title: option.title,
      "data-event": option.event,
      "data-value": option.value,
      style: option.stage === undefined || !option.on ? undefined : `--stage: ${stageColour(option.stage)}; --tint: var(--wb-stage-${option.stage % 4}-tint)`,
    };
    group.append(make("button", attributes, String(option.label)));
  }
  return group;
}

function choiceCell(row) {
  const options = ["data", "model"].map((value) => ({
    label: value,
    value,
    event: "parallel",
    on: row.parallel === value,
    bad: row.bad === "parallel",
    title: value === "data" ? "whole weight on every rank, batch split (D)" : "weight split over the model axis (M); Enter: auto, column, row",
  }));
  return make("div", { role: "gridcell" }, segment(`${row.name}: data or model`, options, "choice"));
}

function stageCell(row, stages) {
  if (stages.length > 4) return make("div", { role: "gridcell" }, stageList(row, stages));
  const options = stages.map((stage) => ({
    label: stage,
    value: stage,
    stage,
    event: "stage",
    on: row.stage === stage,
    bad: row.bad === "stage",
    title: `pipeline stage ${stage}`,
  }));
  return make("div", { role: "gridcell" }, segment(`${row.name}: pipeline stage`, options, "stage"));
}

function stageList(row, stages) {
  const options = stages.map((stage) => make("option", { value: stage, selected: row.stage === stage }, String(stage)));
  const css = row.bad === "stage" ? "stage-list bad" : "stage-list";
  const style = `border-bottom-color: ${stageColour(row.stage)}`;
  return make("select", { class: css, style, "data-event": "stage", tabindex: "-1", "aria-label": `${row.name}: pipeline stage` }, ...options);
}

function ranksCell(row, view) {
  const height = row.height;
  const svg = shape("svg", { width: view.ranks_width, height, role: "img", "aria-label": row.slices_text });
  for (const stage of view.stages) {
    if (row.drawn_stage === stage.number) {
      const tint = `var(--wb-stage-${stage.number % 4}-tint)`;
      svg.append(shape("rect", { x: stage.left, y: 0, width: stage.width, height, style: `fill: ${tint}`, opacity: 0.55 }));
    }
    if (stage.left > 0) svg.append(shape("line", { x1: stage.left, x2: stage.left, y1: 0, y2: height, class: "rule" }));
  }
  row.slices.forEach((slice, index) => drawSlice(svg, slice, view.columns[index], row));
  return make("div", { role: "gridcell", class: "ranks" }, svg);
}

function drawSlice(svg, slice, column, row) {
  const middle = row.height / 2;
  const centre = column.centre;
  if (!slice) {
    svg.append(shape("line", { x1: centre - 3, x2: centre + 3, y1: middle, y2: middle, class: "absent" }));
    return;
  }
  const [width, height] = row.picture;
  const left = centre - width / 2;
  const top = middle - height / 2;
  svg.append(shape("rect", { x: left, y: top, width, height, class: "whole" }));
  for (const part of slice.parts) {
    svg.append(
      shape("rect", {
        x: left + part.x * width,
        y: top + part.y * height,
        width: Math.max(part.w * width, 1),
        height: Math.max(part.h * height, 1),
        style: `fill: ${stageColour(column.stage, part.shade)}`,
      }),
    );
  }
  const outline = shape("rect", { x: left - 0.5, y: top - 0.5, width: width + 1, height: height + 1, class: row.kept ? "outline kept" : "outline" });
  const tip = shape("title", {});
  tip.textContent = `${column.label}: ${slice.text}`;
  outline.append(tip);
  svg.append(outline);
}

function flowCell(row) {
  const cell = make("div", { role: "gridcell", class: "flow" }, make("span", { class: "thread" }), make("span", { class: "dot" }));
  const flow = row.flow;
  if (!flow) return cell;
  cell.append(make("span", { class: "act" }, flow.layout));
  if (flow.note) cell.append(make("span", { class: "note" }, flow.note));
  if (flow.boxing) {
    const { change, kind, bytes, free, title } = flow.boxing;
    const badge = make("span", { class: free ? "badge free" : "badge", title }, make("code", {}, change), make("span", { class: "kind" }, kind), make("b", {}, bytes));
    cell.append(badge);
  }
  return cell;
}

function errorLine(row, mistake, index) {
  const line = make("div", { class: "wb-error-line", role: "row", id: `${row.id}-error-${index}` });
  const cell = make("div", { role: "gridcell" }, make("span", {}, mistake.message));
  for (const fix of mistake.fixes) {
    const action = fix.value === null ? "span" : "button";
    cell.append(make(action, { class: "fix", tabindex: "-1", "data-event": "fix", "data-value": fix.value, "data-layer": row.name }, fix.label));
  }
  if (row.kept) cell.append(make("span", { class: "quiet" }, "pictures keep the last valid choice (dashed)"));
  line.append(cell);
  return line;
}

// ---- the whole grid --------------------------------------------------------------------------------------------

function header(view) {
  const svg = shape("svg", { width: view.ranks_width, height: 43, "aria-hidden": "true" });
  for (const stage of view.stages) {
    const left = stage.left + 5;
    svg.append(shape("rect", { x: left, y: 5, width: stage.width - 10, height: 16, style: `fill: var(--wb-stage-${stage.number % 4}-tint)` }));
    svg.append(shape("rect", { x: left, y: 5, width: 3, height: 16, style: `fill: ${stageColour(stage.number)}` }));
    svg.append(text(left + 9, 17, stage.label));
    if (stage.axis) svg.append(text(stage.left + stage.width - 10, 17, stage.axis, "quiet end"));
    if (stage.left > 0) svg.append(shape("line", { x1: stage.left, x2: stage.left, y1: 4, y2: 43, class: "rule" }));
  }
  for (const column of view.columns) {
    const start = column.centre - (column.label.length > 2 ? 29 : 12);
    svg.append(shape("rect", { x: start, y: 27, width: 10, height: 10, style: `fill: ${stageColour(column.stage, column.shade)}` }));
    svg.append(text(start + 15, 37, column.label));
  }
  const titles = [
    ["layer", "name"],
    ["weight", "num"],
    ["params", "num"],
    ["choice", ""],
    ["sbp", ""],
    ["stage", ""],
  ].map(([title, css]) => make("div", { role: "columnheader", class: css }, title));
  const ranks = make("div", { role: "columnheader", class: "ranks", "aria-label": "who holds which part" }, svg);
  const flow = make("div", { role: "columnheader", class: "flow-head" }, make("span", {}, view.flow_title), make("span", { class: "quiet" }, view.flow_detail));
  return make("div", { class: "wb-row head", role: "row" }, ...titles, ranks, flow);
}

function text(x, y, content, css = "") {
  const node = shape("text", { x, y, class: css });
  node.textContent = content;
  return node;
}

function layerRow(row, view) {
  const css = row.mistakes.length ? "wb-row bad" : "wb-row";
  const described = row.mistakes.map((_, index) => `${row.id}-error-${index}`).join(" ");
  const attributes = {
    class: css,
    role: "row",
    "data-layer": row.name,
    style: `height: ${row.height}px`,
    "aria-invalid": row.mistakes.length ? "true" : undefined,
    "aria-describedby": described || undefined,
  };
  return make(
    "div",
    attributes,
    make("div", { role: "rowheader", class: "name", title: `${row.name}: ${row.kind}` }, make("span", {}, row.name), make("span", { class: "quiet" }, row.kind)),
    make("div", { role: "gridcell", class: "num" }, row.weight),
    make("div", { role: "gridcell", class: "num" }, row.params),
    choiceCell(row),
    make("div", { role: "gridcell", class: "mono", title: row.sbp_title }, row.sbp),
    stageCell(row, view.stage_options),
    ranksCell(row, view),
    flowCell(row),
  );
}

function drawGrid(root, view) {
  const rows = [header(view)];
  for (const row of view.rows) {
    rows.push(layerRow(row, view));
    row.mistakes.forEach((mistake, index) => rows.push(errorLine(row, mistake, index)));
  }
  const total = make("div", { class: "wb-total" }, make("span", { class: "quiet" }, view.note), make("span", {}, view.total));
  root.style.setProperty("--ranks-width", `${view.ranks_width}px`);
  root.replaceChildren(make("div", { class: "wb-rows" }, ...rows), total);
}

// ---- behaviour -------------------------------------------------------------------------------------------------

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
