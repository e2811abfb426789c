"""Hooks of the documentation's site (mkdocs.yml): what lies outside docs/, addresses of public names, help of commands.

* CONTRIBUTING.md, CHANGELOG.md, the benchmarks' results and the notebooks lie under ``project/``.
* ``::: wb.randn`` stands for the function that users call so; options may follow, as for any other object.
* ``<!-- help: plan -->`` stands for what ``workbench plan --help`` says, ``<!-- help: %%global -->`` a magic's.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from workbench.lazy import address_of

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")
_NAME = re.compile(r"^::: wb\.([\w.]+)$(\n    options:\n)?(?:      heading: .*\n)?", re.MULTILINE)
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)#\s]+)\.(svg|png)\)")
_ROW, _CODE = re.compile(r"^\|.*\|$", re.MULTILINE), re.compile(r"`[^`]*`")
_HELP = re.compile(r"^<!-- help: (\S+) -->$", re.MULTILINE)


def copied() -> dict[str, str]:
    """Files outside docs/ that the site has, and their places in it.

    >>> copied()["CONTRIBUTING.md"]
    'project/contributing.md'
    """
    files = {
        "CONTRIBUTING.md": "project/contributing.md",
        "CHANGELOG.md": "project/changelog.md",
        "benchmarks/published_runs.csv": "project/published_runs.csv",
    }
    folders = {
        "benchmarks/results": ("*.md", "project/results"),
        "notebooks": ("*.ipynb", "project/notebooks"),
        "notebooks/gallery": ("*.ipynb", "project/notebooks/gallery"),
    }
    for folder, (pattern, place) in folders.items():
        files |= {f"{folder}/{path.name}": f"{place}/{path.name}" for path in sorted((ROOT / folder).glob(pattern))}
    return files


def turn_links(text: str, page: str) -> str:
    """Links of a page, written for its place in the repository, as they are in the site.

    >>> turn_links("[rows](../benchmarks/published_runs.csv)", "planner.md")
    '[rows](project/published_runs.csv)'
    >>> turn_links("[boxing](docs/boxing.md#gradients)", "project/contributing.md")
    '[boxing](../boxing.md#gradients)'
    """
    places = copied() | {"benchmarks/results": "project/results/index.md"}
    sources = {place: source for source, place in places.items()}
    here = posixpath.dirname(sources.get(page, f"docs/{page}"))

    def turned(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, found[2]))
        place = places.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        return found[0] if place is None else found[1] + posixpath.relpath(place, posixpath.dirname(page) or ".")

    return _LINK.sub(turned, text)


def bare_pipes(text: str) -> str:
    """Code in tables without the backslashes that GitHub asks for before ``|`` and that mkdocs would show.

    >>> bare_pipes("| `*: data \\\\| zero=1` | 2 |")
    '| `*: data | zero=1` | 2 |'
    """
    return _ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), text)


def name_objects(text: str) -> str:
    """``::: wb.randn`` with the address of the function and the name that users write.

    >>> print(name_objects("::: wb.randn").strip())
    ::: workbench.api.randn
        options:
          heading: wb.randn
          toc_label: randn
    """

    def named(found: re.Match[str]) -> str:
        name = found[1]
        space, _, last = name.rpartition(".")
        address = address_of(f"workbench.{space}".rstrip("."), last)
        return f"::: {address}\n    options:\n      heading: wb.{name}\n      toc_label: {name}\n"

    return _NAME.sub(named, text)


def show_by_theme(text: str, page: str) -> str:
    """A picture that has a ``-dark`` one beside it, as two of which the theme shows one.

    >>> show_by_theme("![GPipe](../images/concepts/gpipe.svg)", "concepts/pipelines.md")
    '![GPipe](../images/concepts/gpipe.svg#only-light)![GPipe](../images/concepts/gpipe-dark.svg#only-dark)'
    """

    def both(found: re.Match[str]) -> str:
        words, name, ending = found.groups()
        dark = ROOT / "docs" / posixpath.dirname(page) / f"{name}-dark.{ending}"
        if not dark.exists():
            return found[0]
        return f"![{words}]({name}.{ending}#only-light)![{words}]({name}-dark.{ending}#only-dark)"

    return _IMAGE.sub(both, text)


def help_of(name: str) -> str:
    """What ``workbench NAME --help`` says, or ``%%NAME?`` of a magic.

    >>> help_of("doctor").splitlines()[0].split(" [")[0]
    'usage: workbench doctor'
    """
    with mock.patch.dict(os.environ, COLUMNS="100", NO_COLOR="1"):  # argparse's lines are as wide as the terminal
        if not name.startswith("%"):
            from workbench.cli import make_parser

            (commands,) = make_parser()._subparsers._group_actions  # type: ignore[union-attr]
            parser: Any = commands.choices[name]  # type: ignore[index]
            return str(parser.format_help())
        from workbench.session.magic import SessionMagics

        magic: Any = SessionMagics.cell_global if name.startswith("%%") else SessionMagics.line_workbench
        said = str(magic.parser.format_help()).replace("::\n\n  ", "", 1).replace("``", "")
        return re.sub(r"^%\w+", name, said)


def say_help(text: str) -> str:
    """Every mark of the kind ``help: NAME`` as a block with that help."""
    return _HELP.sub(lambda found: f"```text\n{help_of(found[1]).strip()}\n```", text)


def list_of_results() -> str:
    """A page with all results of benchmarks, the newest day first.

    >>> "boxing-2.md)" in list_of_results()
    True
    """
    rows = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"), key=lambda path: path.name[:10], reverse=True):
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        rows.append(f"| {path.name[:10]} | [{title}]({path.name}) |")
    return "\n".join(["# Results of benchmarks", "", "| day | what |", "|---|---|", *rows, ""])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Bring in the files from outside docs/."""
    from mkdocs.structure.files import File

    for source, place in copied().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "project/results/index.md", content=list_of_results()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links, choose pictures, name objects and say help before the page is made."""
    here = page.file.src_uri
    return say_help(name_objects(show_by_theme(turn_links(bare_pipes(markdown), here), here)))
