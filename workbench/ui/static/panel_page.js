// What the panel does in the page besides the grid: tips, menus, the Copy button, the chip that jumps to a problem.

const TIP_DELAY = 300;
const QUIET = 1500;

// ---- tips: on hover and on focus by keyboard, closed by Esc -----------------------------------------------------

function showTip(panel, target) {
  const content = target.dataset.tip;
  if (!content || !target.isConnected) return;
  let tip = panel.querySelector(":scope > .wb-tip");
  if (!tip) {
    tip = make("div", { class: "wb-tip", role: "tooltip" });
    panel.append(tip);
  }
  tip.textContent = content;
  tip.hidden = false;
  const [frame, place] = [panel.getBoundingClientRect(), target.getBoundingClientRect()];
  const left = Math.min(place.left - frame.left, frame.width - tip.offsetWidth - 8);
  const below = place.bottom - frame.top + 6;
  const fits = below + tip.offsetHeight <= frame.height || place.top - frame.top < tip.offsetHeight + 6;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${fits ? below : place.top - frame.top - tip.offsetHeight - 6}px`;
}

function hideTip(root) {
  const panel = root.closest(".wb-panel");
  const tip = panel?.querySelector(":scope > .wb-tip:not([hidden])");
  if (tip) tip.hidden = true;
  return Boolean(tip);
}

function serveTips(panel) {
  let waiting;
  let quietUntil = 0; // after a click the eye is on what it changed
  const later = (event, wanted) => {
    clearTimeout(waiting);
    const target = event.target.closest?.("[data-tip]");
    hideTip(panel);
    const delay = Math.max(TIP_DELAY, quietUntil - Date.now());
    if (target && wanted(target)) waiting = setTimeout(() => showTip(panel, target), delay);
    highlight(panel, event.target.closest?.("[data-ranks]"));
  };
  const over = (event) => later(event, () => true);
  const focus = (event) => later(event, (target) => target.matches(":focus-visible"));
  const leave = () => {
    clearTimeout(waiting);
    hideTip(panel);
    highlight(panel, null);
  };
  const click = () => {
    quietUntil = Date.now() + QUIET;
    leave();
  };
  const redrawn = new MutationObserver(() => light(panel)); // what was drawn anew while the mouse rests
  redrawn.observe(panel, { childList: true, subtree: true });
  panel.addEventListener("click", click);
  panel.addEventListener("mouseover", over);
  panel.addEventListener("mouseleave", leave);
  panel.addEventListener("focusin", focus);
  panel.addEventListener("focusout", leave);
  return () => {
    redrawn.disconnect();
    panel.removeEventListener("click", click);
    panel.removeEventListener("mouseover", over);
    panel.removeEventListener("mouseleave", leave);
    panel.removeEventListener("focusin", focus);
    panel.removeEventListener("focusout", leave);
  };
}

// A rank's column, its memory bar and its row of the timeline light up together.
function highlight(panel, target) {
  const wanted = target?.dataset.ranks.split(" ")[0];
  if (panel.dataset.hot === wanted) return;
  if (wanted === undefined) delete panel.dataset.hot;
  else panel.dataset.hot = wanted;
  for (const element of panel.querySelectorAll(".hot")) element.classList.remove("hot");
  light(panel);
}

function light(panel) {
  const wanted = panel.dataset.hot;
  if (wanted === undefined) return;
  for (const element of panel.querySelectorAll("[data-ranks]")) {
    if (element.dataset.ranks.split(" ").includes(wanted)) element.classList.add("hot");
  }
}

// ---- menus -------------------------------------------------------------------------------------------------------

function openMenu(root, anchor, items, current, choose, close) {
  root.querySelector(".wb-menu")?.remove();
  hideTip(root);
  const menu = make("div", { class: "wb-menu", role: "menu" });
  for (const [value, label, detail] of items) {
    const attributes = { role: "menuitemradio", "aria-checked": String(value === current), tabindex: "-1", "data-value": value };
    menu.append(make("button", attributes, make("code", {}, label), make("span", { class: "quiet" }, detail)));
  }
  root.append(menu);
  const [frame, place] = [root.getBoundingClientRect(), anchor.getBoundingClientRect()];
  const below = place.bottom - frame.top + 3;
  menu.style.left = `${place.left - frame.left}px`;
  menu.style.top = `${below + menu.offsetHeight > frame.height && place.top - frame.top > menu.offsetHeight ? place.top - frame.top - menu.offsetHeight - 3 : below}px`;
  const buttons = [...menu.children];
  let open = true; // removing what has the focus fires focusout once more
  const finish = (value, keepFocus = true) => {
    if (!open) return;
    open = false;
    menu.remove();
    if (value !== undefined) choose(value);
    if (keepFocus) close();
  };
  menu.addEventListener("click", (event) => {
    event.stopPropagation();
    finish(event.target.closest("button")?.dataset.value);
  });
  menu.addEventListener("keydown", (event) => {
    const at = buttons.indexOf(document.activeElement);
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) buttons[(at + by + buttons.length) % buttons.length].focus();
    if (event.key === "Escape" || event.key === "Tab") finish();
    if (event.key === "Enter" || event.key === " ") finish(document.activeElement.dataset.value);
    event.stopPropagation();
    event.preventDefault();
  });
  menu.addEventListener("focusout", (event) => {
    if (!menu.contains(event.relatedTarget)) finish(undefined, false);
  });
  (buttons.find((button) => button.dataset.value === current) ?? buttons[0]).focus();
}

// ---- the bars above the grid are Jupyter widgets; what they cannot do is done here --------------------------------

function servePanel(root, grid) {
  let stop = () => {};
  const begin = () => {
    const panel = root.closest(".wb-panel");
    if (!panel) return false;
    const stopTips = serveTips(panel);
    const stopNames = serveNames(panel);
    const click = (event) => {
      if (event.target.closest(".wb-problem")) grid.nextProblem();
      const fix = event.target.closest(".wb-mistake-list [data-fix]");
      if (fix) grid.send("fix", { row: null, value: fix.dataset.fix });
      const open = event.target.closest(".wb-open");
      if (open) grid.send("open", { value: open.dataset.text });
      const copy = event.target.closest(".wb-copy");
      if (copy) copyText(panel.querySelector(".wb-text input").value, copy);
    };
    panel.addEventListener("click", click);
    stop = () => {
      stopTips();
      stopNames();
      panel.removeEventListener("click", click);
    };
    return true;
  };
  // The grid is drawn before its host hangs in the page.
  const frame = () => begin() || requestAnimationFrame(frame);
  frame();
  return () => stop();
}

async function copyText(content, button) {
  try {
    await navigator.clipboard.writeText(content);
  } catch {
    const area = make("textarea", { class: "wb-offscreen" });
    area.value = content;
    document.body.append(area);
    area.select();
    document.execCommand("copy"); // pages that are not secure have no clipboard
    area.remove();
  }
  button.classList.add("wb-copied");
  setTimeout(() => button.classList.remove("wb-copied"), 1200);
}
