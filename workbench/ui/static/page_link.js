// What Python cannot know by itself: the page's theme, how wide the panel is, and whether anybody sees the live view. And
// what it cannot do: hand the reader a file. Reports {event: "theme", value}, {event: "width", value}, in pixels,
// {event: "visible", value, view} and {event: "pong", value}; takes {event: "ping", number} and {event: "download", name, type}.

const SETTLED = 150; // milliseconds: while a window is dragged nothing is drawn anew

function watchWidth(el, report) {
  let known, waiting;
  const tell = (width) => {
    if (width && width !== known) report("width", (known = width));
  };
  const observer = new ResizeObserver(([{ target }]) => {
    clearTimeout(waiting);
    if (known === undefined) tell(target.clientWidth);
    else waiting = setTimeout(() => tell(target.clientWidth), SETTLED);
  });
  requestAnimationFrame(() => observer.observe(el.closest(".wb-panel") ?? el));
  return () => {
    clearTimeout(waiting);
    observer.disconnect();
  };
}

function render({ model, el }) {
  const report = (event, value, more) => model.send({ event, value, ...more });
  const receive = (message) => {
    // Messages are handled in order: the frame that follows this one has drawn what was sent before it.
    if (message.event === "ping") requestAnimationFrame(() => setTimeout(() => report("pong", message.number), 0));
  };
  model.on("msg:custom", receive);
  const ends = [serveDownloads(model), watchTheme(report), watchWidth(el, report), watchVisibility(el, ".wb-live-view", report)];
  return () => {
    model.off("msg:custom", receive);
    for (const end of ends) end();
  };
}

export default { render };
