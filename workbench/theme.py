"""The two colour tables, light and dark, as data: a colour means one thing wherever it appears.

Style sheets read JupyterLab's ``--jp-*`` variables with these values as fallbacks; plotly cannot read variables and is
handed a ``Palette``. Hue = pipeline stage, shade = rank inside the stage. The sets were checked for the three kinds of
colour blindness; where two colours come close, a number, a label or a hatch says the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

UI_FONT = 'system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif'
CODE_FONT = 'Menlo, Consolas, "DejaVu Sans Mono", monospace'


@dataclass(frozen=True, slots=True)
class StageColours:
    """Colours of one pipeline stage: ``shades`` for its ranks in turn, ``tint`` for its ground."""

    shades: tuple[str, str]
    tint: str


@dataclass(frozen=True, slots=True)
class Palette:
    """One theme's colours by role."""

    name: str
    stages: tuple[StageColours, ...]
    memory: dict[str, str]
    forward: str
    backward: str
    optimizer_step: str
    boxing: str
    boxing_tint: str
    idle: str
    error: str
    error_tint: str
    ok: str
    warning: str
    warning_tint: str
    selected: str
    selected_row: str
    accent: str
    on_accent: str
    sunk: str
    ink: str
    muted: str
    line: str
    strong_line: str
    background: str

    def stage(self, stage: int) -> StageColours:
        """Colours of a stage; the hues repeat from stage 4."""
        return self.stages[stage % len(self.stages)]

    def rank_colour(self, stage: int, position: int) -> str:
        """Colour of the ``position``-th rank of ``stage``; the shades alternate."""
        shades = self.stage(stage).shades
        return shades[position % len(shades)]

    @property
    def compute(self) -> str:
        """Colour of time spent in computing."""
        return self.backward


LIGHT = Palette(
    name="light",
    stages=(
        StageColours(("#0b5a9d", "#6fb1e0"), "#e3eef8"),
        StageColours(("#a84f00", "#f0a94a"), "#fcefdd"),
        StageColours(("#006b54", "#9be0cc"), "#e0f3ec"),
        StageColours(("#333333", "#a8a8a8"), "#ececec"),
    ),
    memory={
        "parameters": "#404040",
        "gradients": "#858585",
        "optimizer": "#c4c4c4",
        "activations": "#dcbf55",
        "buffers": "#6a1b9a",
    },
    forward="#bccbd9",
    backward="#6f8ba6",
    optimizer_step="#3f566d",
    boxing="#6a1b9a",
    boxing_tint="#f5eefb",
    idle="#c3cad2",
    error="#b3261e",
    error_tint="#fdf0ef",
    ok="#00695c",
    warning="#8a5a00",
    warning_tint="#fdf4e1",
    selected="#e3e8ed",
    selected_row="#f1f6fb",
    accent="#1976d2",
    on_accent="#ffffff",
    sunk="#f6f7f8",
    ink="#212121",
    muted="#5e5e5e",
    line="#e0e0e0",
    strong_line="#bdbdbd",
    background="#ffffff",
)

DARK = Palette(
    name="dark",
    stages=(
        StageColours(("#5aa5e2", "#a9d3f7"), "#1f3244"),
        StageColours(("#e08a35", "#ffc977"), "#402f1c"),
        StageColours(("#2fae8c", "#9aecd6"), "#17382f"),
        StageColours(("#f4f4f4", "#707070"), "#3a3a3a"),
    ),
    memory={
        "parameters": "#f0f0f0",
        "gradients": "#a8a8a8",
        "optimizer": "#6a6a6a",
        "activations": "#d9bd58",
        "buffers": "#a45cff",
    },
    forward="#d9e4ee",
    backward="#93adc6",
    optimizer_step="#6b8299",
    boxing="#a45cff",
    boxing_tint="#2c2340",
    idle="#5a6067",
    error="#ff9d94",
    error_tint="#3a2322",
    ok="#7fcdbf",
    warning="#f0c674",
    warning_tint="#3a311c",
    selected="#4a525a",
    selected_row="#262e36",
    accent="#64b5f6",
    on_accent="#0c1a26",
    sunk="#2a2a2a",
    ink="#e2e2e2",
    muted="#a9a9a9",
    line="#424242",
    strong_line="#616161",
    background="#212121",
)

PALETTES = {palette.name: palette for palette in (LIGHT, DARK)}


def palette(name: str) -> Palette:
    """The palette ``"light"`` or ``"dark"``; any other name is an error that lists the two."""
    try:
        return PALETTES[name]
    except KeyError:
        raise ValueError(f"palette({name!r}): no such theme. Themes are {', '.join(PALETTES)}.") from None


def css_variables(colours: Palette) -> dict[str, str]:
    """The palette as CSS custom properties, ``{"--wb-boxing": "#6a1b9a", ...}``."""
    plain = {f.name: getattr(colours, f.name) for f in fields(colours) if f.type == "str" and f.name != "name"}
    plain["compute"] = colours.compute
    variables = {f"--wb-{name.replace('_', '-')}": value for name, value in plain.items()}
    for kind, value in colours.memory.items():
        variables[f"--wb-memory-{kind}"] = value
    for number, stage in enumerate(colours.stages):
        variables[f"--wb-stage-{number}"] = stage.shades[0]
        variables[f"--wb-stage-{number}-second"] = stage.shades[1]
        variables[f"--wb-stage-{number}-tint"] = stage.tint
    return variables


_FROM_JUPYTERLAB = {
    "--wb-ink": "--jp-ui-font-color1",
    "--wb-line": "--jp-border-color2",
    "--wb-strong-line": "--jp-border-color1",
    "--wb-background": "--jp-layout-color1",
}


def style_sheet(scope: str) -> str:
    """CSS that defines the variables for ``scope`` in both themes.

    The theme is JupyterLab's or VS Code's where one of them is around, else what the reader's system prefers.
    """
    light, dark = (_block(css_variables(colours)) for colours in (LIGHT, DARK))
    dark_hosts = f'[data-jp-theme-light="false"] {scope}, .vscode-dark {scope}'
    outside = f":root:not(:has([data-jp-theme-light])):not(:has(.vscode-light)) {scope}"
    return (
        f"{scope} {{ {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ {outside} {{ {dark} }} }}\n"
        f"{dark_hosts} {{ {dark} }}\n"
    )


def _block(variables: dict[str, str]) -> str:
    def value(name: str, fallback: str) -> str:
        host = _FROM_JUPYTERLAB.get(name)
        return f"var({host}, {fallback})" if host else fallback

    return " ".join(f"{name}: {value(name, fallback)};" for name, fallback in variables.items())
