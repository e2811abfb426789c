// The script of a strategy: shows `text`, which can be scrolled and copied, and hands it over as a file.

function render({ model, el }) {
  const shown = document.createElement("pre");
  Object.assign(shown, { className: "wb-script", tabIndex: 0 });
  shown.setAttribute("aria-label", "the script");
  keepKeys(el);
  el.append(shown);
  const draw = () => (shown.textContent = model.get("text"));
  const stopDownloads = serveDownloads(model);
  model.on("change:text", draw);
  draw();
  return () => {
    model.off("change:text", draw);
    stopDownloads();
  };
}

export default { render };
