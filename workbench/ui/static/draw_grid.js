// The whole grid: header, rows (only those near the visible part, where there are many), error lines, totals.

const ERROR_LINE = 24;
const DRAW_ALL = 80; // rows; above, only what is visible is in the page
const MARGIN = 20;

function header(view) {
  const svg = shape("svg", { width: view.ranks_width, height: 43, "aria-hidden": "true" });
  for (const stage of view.stages) {
    const left = stage.left + (stage.width > 40 ? 5 : 1);
    const width = stage.width - (stage.width > 40 ? 10 : 2);
    svg.append(shape("rect", { x: left, y: 5, width, height: 16, style: `fill: var(--wb-stage-${stage.number % 4}-tint)` }));
    svg.append(shape("rect", { x: left, y: 5, width: 3, height: 16, style: `fill: ${stageColour(stage.number)}` }));
    svg.append(text(left + (stage.width > 40 ? 9 : 6), 17, stage.label));
    if (stage.axis) svg.append(text(stage.left + stage.width - 10, 17, stage.axis, "quiet end"));
    if (stage.left > 0) svg.append(shape("line", { x1: stage.left, x2: stage.left, y1: 4, y2: 43, class: "rule" }));
  }
  for (const column of view.columns) svg.append(...columnHead(column, view));
  const titles = [
    ["weight", "num weight"],
    ["params", "num params"],
    ["choice", "choice-head"],
    ["sbp", "sbp"],
    ["stage", "stage-cell"],
  ].map(([title, css]) => make("div", { role: "columnheader", class: css }, title === "stage" && view.stage_options.length < 2 ? "" : title));
  const ranks = make("div", { role: "columnheader", class: "ranks", "aria-label": "who holds which part" }, svg);
  const boxingHead = make("div", { role: "columnheader", class: "boxing-head" }, make("span", {}, "Activation and boxing"), make("span", { class: "quiet" }, view.boxing_detail));
  return make("div", { class: "wb-row head", role: "row" }, nameHead(view), ...titles, ranks, boxingHead);
}

function nameHead(view) {
  const cell = make("div", { role: "columnheader", class: "name" });
  if (!view.find.shown) cell.append("layer");
  else cell.append(make("input", { class: "wb-find", type: "search", placeholder: "find layer", "aria-label": "find layers by name or glob", value: view.find.text }));
  return cell;
}

function columnHead(column, view) {
  const width = view.columns.length > 1 ? view.columns[1].centre - view.columns[0].centre : 83;
  if (width < 40 || column.label.includes("-")) return [text(column.centre, 37, column.label, "middle")];
  const start = column.centre - (column.label.length * 6.6 + 15) / 2;
  const fill = `fill: ${stageColour(column.stage, column.shade)}`;
  const swatch = shape("rect", { x: start, y: 27, width: 10, height: 10, style: fill, "data-ranks": column.ranks.join(" ") });
  return [swatch, text(start + 15, 37, column.label)];
}

function layerRow(row, index, view) {
  const css = ["wb-row", row.mistakes.length ? "bad" : "", row.depth ? `depth-${Math.min(row.depth, 3)}` : "", row.open === null ? "" : "group"];
  const described = row.mistakes.map((_, number) => `${row.id}-error-${number}`).join(" ");
  const attributes = {
    class: css.filter(Boolean).join(" "),
    role: "row",
    "data-row": row.pattern,
    "aria-rowindex": index + 2,
    "aria-level": row.depth + 1,
    "aria-expanded": row.open === null ? undefined : String(row.open),
    style: `height: ${row.height}px`,
    "aria-invalid": row.mistakes.length ? "true" : undefined,
    "aria-describedby": described || undefined,
  };
  return make(
    "div",
    attributes,
    nameCell(row),
    make("div", { role: "gridcell", class: "num weight" }, row.weight),
    make("div", { role: "gridcell", class: "num params" }, row.params),
    choiceCell(row),
    make("div", { role: "gridcell", class: row.sbp === "mixed" ? "sbp quiet" : "sbp mono", "data-tip": row.sbp_tip || undefined }, row.sbp),
    stageCell(row, view.stage_options, view.new_stage),
    ranksCell(row, view),
    boxingCell(row),
  );
}

function errorLine(row, mistake, index) {
  const line = make("div", { class: "wb-error-line", role: "row", id: `${row.id}-error-${index}` });
  const cell = make("div", { role: "gridcell" }, make("span", {}, mistake.message));
  for (const fix of mistake.fixes) {
    const action = fix.value === null ? "span" : "button";
    cell.append(make(action, { class: "fix", "data-fix": fix.value, "data-of": row.pattern }, fix.label));
  }
  if (row.kept) cell.append(make("span", { class: "quiet" }, "pictures keep the last valid choice (dashed)"));
  line.append(cell, make("div", { class: "boxing-cell" }, make("span", { class: "thread" })));
  return line;
}

function endRow(end) {
  const cells = ["num weight", "num params"].map((css) => make("div", { role: "gridcell", class: css }));
  return make(
    "div",
    { class: "wb-row end", role: "row" },
    make("div", { role: "rowheader", class: "name" }, make("span", { class: "label quiet" }, end.label)),
    ...cells,
    make("div", { role: "gridcell", class: "follows quiet" }, end.text),
    make("div", { role: "gridcell", class: "ranks" }),
    endFlow(end),
  );
}

function endFlow(end) {
  const { layout, boxing } = end.boxings;
  const cell = make("div", { role: "gridcell", class: "boxing-cell" }, make("span", { class: "thread last" }), make("span", { class: "dot" }), make("span", { class: "act" }, layout));
  if (boxing) cell.append(badge(boxing, `boxing before ${end.label}: ${boxing.change} ${boxing.kind} ${boxing.bytes}`));
  return cell;
}

// Pixels from the top at which every row begins, and the height of all of them.
function offsets(rows) {
  const tops = [0];
  for (const row of rows) tops.push(tops.at(-1) + row.height + ERROR_LINE * row.mistakes.length);
  return tops;
}

function windowOf(rows, tops, scroll, height) {
  if (rows.length <= DRAW_ALL) return [0, rows.length];
  let first = tops.findIndex((top) => top >= scroll) - 1;
  if (first < -1) first = rows.length - 1;
  let last = tops.findIndex((top) => top > scroll + height);
  if (last < 0) last = rows.length;
  return [Math.max(0, first - MARGIN), Math.min(rows.length, last + MARGIN)];
}

// `kept(key, make)` hands out the nodes that stand in the page for what has not changed: a click changes one row of many.
function drawRows(view, [first, last], tops, kept) {
  const shared = JSON.stringify([view.ranks_width, view.columns, view.stages, view.stage_options, view.new_stage]);
  const nodes = [make("div", { class: "wb-spacer", style: `height: ${tops[first]}px` })];
  for (let index = first; index < last; index += 1) {
    const row = view.rows[index];
    nodes.push(...kept(`${index} ${JSON.stringify(row)} ${shared}`, () => [layerRow(row, index, view), ...row.mistakes.map((mistake, number) => errorLine(row, mistake, number))]));
  }
  nodes.push(make("div", { class: "wb-spacer", style: `height: ${tops[view.rows.length] - tops[last]}px` }));
  if (last === view.rows.length && view.end) nodes.push(...kept(JSON.stringify(view.end), () => [endRow(view.end)]));
  if (!view.rows.length) nodes.push(make("div", { class: "wb-nothing quiet" }, `no layer matches ${view.find.text}`));
  return nodes;
}

// Like replaceChildren, but nodes that stay are not taken out of the page: they keep their focus, and are not laid out anew.
function putChildren(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.childNodes]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, index) => {
    if (parent.childNodes[index] !== node) parent.insertBefore(node, parent.childNodes[index] ?? null);
  });
}

function totalLine(view) {
  const [total, parts] = view.total;
  const sum = make("span", { class: "sum" }, "boxed per step ", make("b", {}, total), make("span", { class: "quiet" }, ` = ${parts}`));
  const tip = "pictures of the selected layer's tensors: who holds which part";
  const tensor = make("button", { class: `wb-link wb-tensor-link${view.tensor ? " open" : ""}`, "aria-expanded": String(Boolean(view.tensor)), "data-tip": tip }, "tensors of the selected row");
  return make("div", { class: "wb-total" }, make("span", { class: "quiet" }, view.note), tensor, sum);
}

function stageWidth(view) {
  const count = view.stage_options.length;
  return count < 2 ? 8 : count > 4 ? 66 : 14 + 22 * count;
}
