// Draws the layer grid from the `view` that Python sends. No state, no events; grid.js, which follows in the same module,
// has those.

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
