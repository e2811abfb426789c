// The comparison: Python draws table and scatter, this puts them in place and reports what the user does there:
//   {event: "sort", value: column}, {event: "select", value: key}, {event: "rename", value: key, name}
// It also hands over files: {event: "download", name, type} with their content.

function rename(cell, send, draw) {
  const name = cell.querySelector("b");
  const input = document.createElement("input");
  Object.assign(input, { className: "wb-rename", value: name.textContent });
  let isDone = false;
  const done = (keep, byKey = false) => {
    if (isDone) return; // taking the field away blurs it
    isDone = true;
    input.replaceWith(name);
    if (byKey) cell.parentElement.focus();
    if (keep && input.value.trim()) send("rename", { value: cell.parentElement.dataset.key, name: input.value.trim() });
    draw(); // what came while the name was being written
  };
  input.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter" || event.key === "Escape") done(event.key === "Enter", true);
  });
  input.addEventListener("blur", () => done(true));
  name.replaceWith(input);
  input.select();
}

function render({ model, el }) {
  const send = (event, more) => model.send({ event, ...more });
  const root = document.createElement("div");
  root.className = "wb-comparison";
  keepKeys(root);
  el.append(root);
  const draw = () => {
    if (root.querySelector("input.wb-rename")) return;
    const focused = root.contains(document.activeElement) ? document.activeElement.closest("[data-key], th[data-sort]")?.dataset : null;
    const scroll = root.querySelector(".wb-table-box")?.scrollTop ?? 0;
    root.innerHTML = model.get("page");
    const box = root.querySelector(".wb-table-box");
    if (box) box.scrollTop = scroll;
    if (!focused) return;
    const again = focused.key === undefined ? `th[data-sort="${focused.sort}"] button` : `tr[data-key="${CSS.escape(focused.key)}"]`;
    root.querySelector(again)?.focus({ preventScroll: true });
  };
  root.addEventListener("click", (event) => {
    const header = event.target.closest("th[data-sort]");
    if (header) return send("sort", { value: header.dataset.sort });
    const part = event.target.closest("[data-part]");
    if (part) return send("part", { value: part.dataset.part });
    const marked = event.target.closest("[data-key]");
    if (marked && event.target.tagName !== "INPUT") send("select", { value: marked.dataset.key });
  });
  root.addEventListener("mousedown", (event) => {
    // Not on "dblclick": the first click selects the row, and a row that is drawn anew under the pressed mouse has none.
    const cell = event.detail === 2 && event.target.closest("td.name");
    if (!cell || event.target.tagName === "INPUT") return;
    event.preventDefault(); // the field keeps the focus
    rename(cell, send, draw);
  });
  root.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr[data-key]");
    if (!row || event.target.tagName === "INPUT") return;
    event.stopPropagation(); // keys of the table never reach the notebook
    const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
    if (next) next.focus();
    else if (event.key === "Enter") send("select", { value: row.dataset.key });
    else if (event.key === "F2") rename(row.querySelector("td.name"), send, draw);
    else return;
    event.preventDefault();
  });
  const stopDownloads = serveDownloads(model);
  let stopNames = () => {};
  requestAnimationFrame(() => {
    const panel = el.closest(".wb-panel");
    if (panel) stopNames = serveNames(panel);
  });
  model.on("change:page", draw);
  draw();
  return () => {
    stopNames();
    model.off("change:page", draw);
    stopDownloads();
  };
}

export default { render };
