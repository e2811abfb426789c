// Draws every figure in the colours of the reader's theme, and again when the theme changes.
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function draw() {
  const theme = dark.matches ? "dark" : "light";
  for (const [name, themes] of Object.entries(figures)) {
    const { data, layout } = themes[theme];
    Plotly.react(name, data, { ...layout, autosize: true }, { responsive: true, displaylogo: false });
  }
}

dark.addEventListener("change", draw);
draw();
