// What several of our views do: make elements, name their controls, keep their keys, tell which theme the page has.

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Jupyter's fields have labels of their own, which the panel does not use: each is named after the words before it.
function nameControls(panel) {
  for (const bar of panel.querySelectorAll(".wb-bar, .wb-field")) {
    let name = "";
    for (const child of bar.children) {
      const words = child.querySelector(":scope > .widget-html-content > .wb-quiet")?.textContent.trim();
      if (words && words !== "\u00d7") name = words;
      const control = child.matches(".wb-bar, .wb-field") ? null : child.querySelector("select, input:not([type='checkbox']), [role='slider']");
      if (control && name && !control.hasAttribute("aria-label")) control.setAttribute("aria-label", name);
    }
  }
}

// Fields come one by one, after what serves them. Returns what ends it.
function serveNames(panel) {
  nameControls(panel);
  const grown = new MutationObserver(() => nameControls(panel));
  grown.observe(panel, { childList: true, subtree: true });
  return () => grown.disconnect();
}

// Notebook 7 takes keys on their way to what has the focus (D D would delete the cell), unless that very element says no.
function keepKeys(root) {
  root.addEventListener("focusin", (event) => {
    event.target.dataset.lmSuppressShortcuts = "true";
  });
}

// Figures cannot read style sheets, so this reports the theme to Python, now and on every change. Returns a function that stops it.
function watchTheme(report) {
  const theme = () => {
    const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
    return jpThemeLight === "false" || (vscodeThemeKind ?? "").includes("dark") ? "dark" : "light";
  };
  let known = null;
  const check = () => {
    if (theme() !== known) report("theme", (known = theme()));
  };
  const observer = new MutationObserver(check);
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
  check();
  return () => observer.disconnect();
}

// Tells whether anybody sees the part of the page around `el` that the selector finds. Returns what ends it.
function watchVisibility(el, selector, report) {
  const view = crypto.randomUUID?.() ?? String(Math.random()); // one model may be shown in several places
  let inView = true;
  let known = null;
  const check = () => {
    const seen = inView && document.visibilityState === "visible";
    if (seen !== known) report("visible", (known = seen), { view });
  };
  const leave = () => {
    if (known) report("visible", (known = false), { view });
  };
  const observer = new IntersectionObserver((entries) => {
    inView = entries[entries.length - 1].isIntersecting;
    check();
  });
  requestAnimationFrame(() => observer.observe(el.closest(selector) ?? el)); // the element itself may be empty
  document.addEventListener("visibilitychange", check);
  window.addEventListener("pagehide", leave);
  check();
  return () => {
    observer.disconnect();
    document.removeEventListener("visibilitychange", check);
    window.removeEventListener("pagehide", leave);
    leave();
  };
}
