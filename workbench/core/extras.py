"""The packages of the project's extras, by their own names: on PyPI another project is called ``workbench``."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires


def packages_of(extra: str = "", package: str = "") -> list[str]:
    """What an extra needs, with versions; without one, what the workbench always needs. Or one package of it.

    >>> packages_of("tensorboard")
    ['tensorboard']
    """
    try:
        lines = requires("workbench") or []
    except PackageNotFoundError:  # read from a folder, and not installed
        return []
    found = []
    for line in lines:
        needed, _, condition = line.partition(";")
        (asked,) = re.findall(r'extra == "(.+?)"', condition) or [""]
        own = re.match(r"workbench\[(.+)\]", needed)
        if asked == extra:
            found += [each for name in own[1].split(",") for each in packages_of(name)] if own else [needed.strip()]
    return [each for each in found if not package or re.match(rf"{re.escape(package)}(?![\w-])", each)]


def install_command(extra: str, package: str = "") -> str:
    """The command that installs what an extra needs, or one package of it.

    >>> install_command("demo", "scikit-learn")
    'pip install scikit-learn'
    """
    return f"pip install {shlex.join(packages_of(extra, package) or [package or f'.[{extra}]'])}"
