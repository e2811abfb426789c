// Shows a plotly figure as Python has it: its traces and its layout, whenever they change. Nothing is sent back, and what is
// shown is all in the model: a page that comes late, or comes back, or was away for a while shows what is.
// Plotly's script of 5 MB is a part of the model, not of this module: a model whose module takes longer than two seconds to
// load never hears of a change. A page loads it once, however many figures it shows.
function plotly(model) {
  const loaded = (globalThis.workbenchPlotly ??= {});
  const version = model.get("plotly_version");
  loaded[version] ??= load(model.get("plotly_script"));
  return loaded[version];
}

async function load(script) {
  const asModule = ["const module = { exports: {} };\n", script, "\nexport default module.exports;"];
  const url = URL.createObjectURL(new Blob(asModule, { type: "text/javascript" }));
  try {
    return (await import(url)).default;
  } finally {
    URL.revokeObjectURL(url);
  }
}

function initialize({ model }) {
  plotly(model); // before anything is shown: a run may last a second only
}

// What the reader has zoomed in to, by axis: it stays until the reader wants all of it again, or another run begins, or the
// axis has another scale, on which its numbers mean something else. (Plotly would give it up with the next step that makes an
// axis longer.)
function zoomedAxes() {
  let run;
  let types = {};
  const ranges = {};
  const forget = () => {
    for (const axis in ranges) delete ranges[axis];
  };
  const remember = (changed) => {
    for (const [key, value] of Object.entries(changed)) {
      const [, axis, end] = key.match(/^([xy]axis\d*)\.range\[(\d)\]$/) ?? [];
      if (axis) (ranges[axis] ??= [])[end] = value;
    }
  };
  const apply = (layout) => {
    if (layout.uirevision !== run) forget();
    run = layout.uirevision;
    for (const [axis, range] of Object.entries(ranges)) {
      if (layout[axis].type === types[axis]) layout[axis].range = [...range];
      else delete ranges[axis];
    }
    types = Object.fromEntries(Object.entries(layout).map(([key, part]) => [key, part?.type]));
    return layout;
  };
  return { forget, remember, apply };
}

// Python draws for the width that the page has; while a cell holds the kernel it cannot hear of it. Until then: smaller.
function fitInto(el, width) {
  const room = el.parentElement?.clientWidth;
  el.style.zoom = room && width > room ? room / width : "";
}

function render({ model, el }) {
  let waiting, shown, config;
  const zoomed = zoomedAxes();
  const draw = () => {
    waiting = undefined;
    // Plotly writes into what it is given, and takes an array that is the same for one that has not changed.
    const traces = Array.from({ length: model.get("num_traces") }, (_, index) => ({ ...model.get(`trace_${index}`) }));
    const outline = structuredClone(model.get("outline"));
    fitInto(el, outline.width);
    shown.react(el, traces, zoomed.apply(outline), config);
  };
  const ask = () => {
    waiting ??= requestAnimationFrame(draw);
  };
  const showAll = () => {
    zoomed.forget();
    ask();
  };
  const ended = new AbortController();
  plotly(model).then((loaded) => {
    if (ended.signal.aborted) return;
    shown = loaded;
    const all = { name: "all", title: "Show all", icon: shown.Icons.home, click: showAll };
    config = { displaylogo: false, displayModeBar: "hover", doubleClick: false };
    config.modeBarButtons = [["toImage", "zoom2d", "pan2d", all]];
    draw();
    el.on("plotly_relayout", zoomed.remember);
    el.on("plotly_doubleclick", showAll);
    model.on("change", ask);
  });
  return () => {
    ended.abort();
    cancelAnimationFrame(waiting);
    model.off("change", ask);
    shown?.purge(el);
  };
}

export default { initialize, render };
