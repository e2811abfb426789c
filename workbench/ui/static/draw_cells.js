// Cells of the layer grid, drawn from the `view` that Python sends: plain functions, data in, nodes out.

const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined) node.setAttribute(name, value);
  }
  return node;
}

function text(x, y, content, css = "") {
  const node = shape("text", { x, y, class: css });
  node.textContent = content;
  return node;
}

function stageColour(stage, shade = 0) {
  return `var(--wb-stage-${stage % 4}${shade % 2 ? "-second" : ""})`;
}

function stageStyle(stage) {
  return `--stage: ${stageColour(stage)}; --tint: var(--wb-stage-${stage % 4}-tint)`;
}

// ---- choices ---------------------------------------------------------------------------------------------------

const CHOICE_TIPS = {
  data: "data: every rank holds the whole weight and works on its part of the batch (key D)",
  model: "model: the weight is split over the model axis (key M). Enter: which way",
  expert: "expert: whole experts on each rank, tokens go to them (key X). Enter: over how many ranks",
};

function segment(label, options, css) {
  const group = make("span", { class: `wb-seg ${css}`, role: "radiogroup", "aria-label": label });
  for (const option of options) {
    const attributes = {
      class: `wb-opt${option.on ? " on" : ""}${option.on && option.bad ? " bad" : ""}`,
      role: "radio",
      "aria-checked": String(Boolean(option.on)),
      tabindex: "-1",
      "data-tip": option.tip,
      "aria-label": option.name,
      "data-event": option.event,
      "data-value": option.value,
      style: option.stage !== undefined && option.on ? stageStyle(option.stage) : undefined,
    };
    group.append(make("button", attributes, String(option.label)));
  }
  return group;
}

function choiceCell(row) {
  const cell = make("div", { role: "gridcell" });
  if (isChild(row)) {
    const css = `wb-opt wb-choice${row.bad === "parallel" ? " on bad" : ""}`;
    const label = `${row.label}: ${row.choice_text}, choose another`;
    cell.append(make("button", { class: css, tabindex: "-1", "aria-haspopup": "menu", "aria-label": label, "data-menu": "choice" }, row.choice_text));
    return cell;
  }
  const values = row.experts.length ? ["data", "model", "expert"] : ["data", "model"];
  const options = values.map((value) => ({
    label: value,
    value,
    event: "choice",
    on: row.parallel === value,
    bad: row.bad === "parallel",
    tip: (value === "model" && row.hint_tip) || CHOICE_TIPS[value],
  }));
  cell.append(segment(`${row.label}: ${values.join(" or ")}`, options, "choice"));
  return cell;
}

// A layer inside a block: it follows the block's stage and says its choice in words.
function isChild(row) {
  return row.depth > 0 && row.open === null;
}

function stageCell(row, stages, added) {
  const cell = make("div", { role: "gridcell", class: "stage-cell" });
  if (isChild(row) || stages.length < 2) return cell;
  if (stages.length > 4) {
    cell.append(stageList(row, stages));
    return cell;
  }
  const options = stages.map((stage) => ({
    label: stage === added ? "+" : stage,
    tip: stage === added ? `a new stage, ${stage}` : undefined,
    name: stage === added ? `new stage ${stage}` : undefined,
    value: stage,
    stage,
    event: "stage",
    on: row.stage === stage,
    bad: row.bad === "stage",
  }));
  cell.append(segment(`${row.label}: pipeline stage`, options, "stage"));
  return cell;
}

function stageList(row, stages) {
  const options = stages.map((stage) => make("option", { value: stage, selected: row.stage === stage }, String(stage)));
  if (row.stage === null) options.unshift(make("option", { value: "", selected: true }, row.stages_text));
  const css = `wb-opt stage-list${row.bad === "stage" ? " bad" : ""}`;
  const style = row.stage === null ? undefined : stageStyle(row.stage);
  return make("select", { class: css, style, "data-event": "stage", tabindex: "-1", "aria-label": `${row.label}: pipeline stage` }, ...options);
}

function nameCell(row) {
  const tip = [row.pattern, row.kind, `weight ${row.weight || "none"}, ${row.params} parameters`, `sbp ${row.sbp}`].filter(Boolean).join("\n");
  const cell = make("div", { role: "rowheader", class: "name", "data-tip": tip });
  if (row.open !== null) {
    const label = row.open ? `fold ${row.label}` : `unfold ${row.label}`;
    cell.append(make("button", { class: `wb-fold${row.open ? " open" : ""}`, tabindex: "-1", "aria-label": label, "data-fold": row.pattern }));
  }
  cell.append(make("span", { class: "label" }, row.label));
  return cell;
}

// How wide the names are, with what stands before them: the column takes so much where the page has it.
function namesWidth(rows) {
  const indent = [24, 40, 56, 74];
  const widths = rows.map((row) => indent[Math.min(row.depth, 3)] + textWidth(row.label, 13) + 10);
  return Math.ceil(Math.min(Math.max(130, ...widths), 420));
}

// How wide the shapes of weights are: "768 \u00d7 3072", or a convolution's "64 \u00d7 64 \u00d7 3 \u00d7 3".
function weightsWidth(rows) {
  return Math.ceil(Math.max(82, ...rows.map((row) => textWidth(row.weight, 12) + 12)));
}

// Two choices, or three where a row has experts.
function choicesWidth(rows) {
  return rows.some((row) => row.experts.length) ? 158 : 104;
}

function textWidth(text, size) {
  const canvas = (textWidth.canvas ??= document.createElement("canvas")).getContext("2d");
  canvas.font = `${size}px ${getComputedStyle(document.body).getPropertyValue("--jp-ui-font-family") || "sans-serif"}`;
  return canvas.measureText(text).width;
}

// ---- who holds what --------------------------------------------------------------------------------------------

function ranksCell(row, view) {
  const height = row.height - 1;
  const svg = shape("svg", { width: view.ranks_width, height, role: "img", "aria-label": slicesText(row, view) });
  const width = view.columns.length > 1 ? view.columns[1].centre - view.columns[0].centre : view.columns[0].centre * 2;
  view.columns.forEach((column, index) => {
    const left = column.centre - width / 2;
    if (row.on[index]) svg.append(shape("rect", { x: left, y: 0, width, height, style: `fill: var(--wb-stage-${column.stage % 4}-tint)`, opacity: 0.55 }));
  });
  for (const stage of view.stages) {
    if (stage.left > 0) svg.append(shape("line", { x1: stage.left, x2: stage.left, y1: 0, y2: height, class: "rule" }));
  }
  view.columns.forEach((column, index) => {
    if (!row.pictures.length) {
      if (!row.on[index]) svg.append(shape("line", { x1: column.centre - 3, x2: column.centre + 3, y1: height / 2, y2: height / 2, class: "absent" }));
      return;
    }
    svg.append(columnPictures(row, column, index, width, height));
  });
  return make("div", { role: "gridcell", class: "ranks" }, svg);
}

function columnPictures(row, column, index, width, height) {
  const held = row.pictures.filter((picture) => picture.slices[index]);
  const group = shape("g", {});
  if (!held.length) {
    group.append(shape("line", { x1: column.centre - 3, x2: column.centre + 3, y1: height / 2, y2: height / 2, class: "absent" }));
    return group;
  }
  const note = held[0].slices[index].note;
  const room = width - (note ? 36 : 8);
  const gap = 4;
  const natural = held.reduce((sum, picture) => sum + picture.size[0] + gap, -gap);
  const scale = Math.min(1, room / natural);
  let left = column.centre - (natural * scale) / 2 - (note ? 14 : 0);
  for (const picture of held) {
    const size = [picture.size[0] * scale, picture.size[1] * Math.sqrt(scale)];
    drawSlice(group, picture.slices[index], column, size, left, height / 2, row.kept);
    left += (picture.size[0] + gap) * scale;
  }
  if (note) group.append(text(column.centre + width / 2 - 5, height / 2 + 4, note, "quiet end"));
  const who = column.label;
  const tip = held.map((picture) => `${held.length > 1 ? `${picture.label}: ` : ""}${picture.slices[index].text}`).join("\n");
  const area = shape("rect", { x: column.centre - width / 2, y: 0, width, height, class: "area", "data-tip": `${who}\n${tip}${row.kept ? "\nthe last valid choice" : ""}`, "data-ranks": column.ranks.join(" ") });
  group.append(area);
  return group;
}

function drawSlice(parent, slice, column, [width, height], left, middle, kept) {
  const top = middle - height / 2;
  parent.append(shape("rect", { x: left, y: top, width, height, class: "whole" }));
  for (const part of slice.parts) {
    parent.append(
      shape("rect", {
        x: left + part.x * width,
        y: top + part.y * height,
        width: Math.max(part.w * width, 1),
        height: Math.max(part.h * height, 1),
        style: `fill: ${stageColour(column.stage, part.shade)}`,
      }),
    );
  }
  parent.append(shape("rect", { x: left - 0.5, y: top - 0.5, width: width + 1, height: height + 1, class: kept ? "outline kept" : "outline" }));
}

function slicesText(row, view) {
  if (!row.pictures.length) return "shown in the rows below";
  const [picture] = row.pictures;
  return view.columns.map((column, index) => `${column.label}: ${picture.slices[index]?.text ?? "nothing"}`).join("; ");
}

// ---- activations -----------------------------------------------------------------------------------------------

function boxingCell(row) {
  const cell = make("div", { role: "gridcell", class: "boxing-cell" }, make("span", { class: "thread" }), make("span", { class: "dot" }));
  const boxings = row.boxings;
  const facts = [row.weight, row.params && `${row.params} parameters`, row.sbp && `sbp ${row.sbp}`].filter(Boolean).join(" \u00b7 ");
  cell.append(make("span", { class: "facts", "aria-hidden": "true" }, facts)); // shown where the columns have no room
  cell.append(make("span", { class: "act", "data-tip": boxings.layout_tip }, boxings.layout));
  if (boxings.note) cell.append(make("span", { class: "note", "data-tip": [boxings.note, row.hint_tip].filter(Boolean).join("\n") }, boxings.note));
  if (boxings.boxing) {
    const label = `boxing before ${row.label}: ${boxings.boxing.change} ${boxings.boxing.kind} ${boxings.boxing.bytes}`;
    cell.append(badge(boxings.boxing, label));
  }
  return cell;
}

function badge({ change, kind, bytes, free, title }, label) {
  const css = free ? "badge free" : "badge";
  return make("span", { class: css, "data-tip": `${kind}\n${title}`, "aria-label": label }, make("code", {}, change), make("span", { class: "kind" }, kind), make("b", {}, bytes));
}
