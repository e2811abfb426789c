// Draws every figure in the colours of the reader's theme, and again when the theme changes.
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function draw() {
  const theme = dark.matches ? "dark" : "light";
  for (const [name, themes] of Object.entries(figures)) {
    const { data, layout } = themes[theme];
    const modebar = { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: layout.font.color }; // beside the title, not over it
    const config = { responsive: true, displaylogo: false, displayModeBar: "hover" };
    Plotly.react(name, data, { ...layout, modebar, autosize: true }, config);
  }
}

dark.addEventListener("change", draw);
draw();
