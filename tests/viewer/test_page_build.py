"""The build of the page: fresh only for its own sources, licences from the lockfile, and messages
with a remedy.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import headwise.viewer
from headwise.viewer.export_files import STATIC

ROOT = Path(__file__).resolve().parents[2]


# kB of gzip: everything the page can load, what the first screen loads, styles; kB of the script of
# an empty export
BUDGETS = {"app": 120, "first screen": 70, "styles": 15, "report": 350}


ADDRESS = re.compile(rb"(?:https?|wss?):(?:\\?/){2}[^\s\"'`<>)\\]*")


NAMESPACE = re.compile(rb"https?://www\.w3\.org/")


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_web", ROOT / "build_web.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def static() -> Path:
    """The built page; without it these tests are skipped, unless CI requires them."""
    if not (STATIC / "report.js").is_file():
        message = "the page is not built; run: make web"
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    return STATIC


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build script over a small page of its own."""
    module = load_build()
    web = tmp_path / "web"
    (web / "src").mkdir(parents=True)
    (web / "src" / "app.ts").write_text("const a = 1;")
    script = (
        "const fs=require('fs');fs.mkdirSync('../static',{recursive:true});"
        "for(const n of "
        "['index.html','app.js','app.css','report.js','learn.js'])fs.writeFileSync('../static/'+n,n)"
    )
    package = {
        "name": "page",
        "version": "1.0.0",
        "private": True,
        "scripts": {"build": f'node -e "{script}"'},
    }
    (web / "package.json").write_text(json.dumps(package))
    lock = {
        "name": "page",
        "version": "1.0.0",
        "lockfileVersion": 3,
        "packages": {"": {"name": "page"}},
    }
    (web / "package-lock.json").write_text(json.dumps(lock))
    monkeypatch.setattr(module, "WEB", web)
    monkeypatch.setattr(module, "STATIC", tmp_path / "static")
    return module


def test_a_page_is_built_once(build: ModuleType):
    if build.find_node() is None:
        pytest.skip("there is no Node >= 20 here")
    assert [build.build(), build.build(), build.is_fresh()] == [True, False, True]
    (build.WEB / "node_modules").mkdir()
    (build.WEB / "node_modules" / "a.js").write_text("not a source")
    assert build.is_fresh()
    (build.WEB / "src" / "app.ts").write_text("const a = 2;")
    assert not build.is_fresh()
    assert build.build()


def test_a_renamed_source_is_another_page(build: ModuleType):
    before = build.hash_sources()
    (build.WEB / "src" / "app.ts").rename(build.WEB / "src" / "page.ts")
    assert build.hash_sources() != before


def test_without_node_the_message_names_a_remedy(build, monkeypatch):
    monkeypatch.setattr(build, "find_node", lambda: None)
    with pytest.raises(
        build.BuildError, match=r"no Node >= 20 with npm; install it, or run: .* -m pip install"
    ):
        build.build()
    hook = build.CustomBuildHook.__new__(build.CustomBuildHook)
    assert hook.dependencies() == [build.NODE_PACKAGE]
    with pytest.raises(SystemExit, match="cannot build the page"):
        hook.initialize("standard", {})
    hook.initialize("editable", {})  # leaves the build to make install


def test_a_failed_build_shows_its_output(build: ModuleType):
    if build.find_node() is None:
        pytest.skip("there is no Node >= 20 here")
    package = json.loads((build.WEB / "package.json").read_text())
    package["scripts"]["build"] = "echo broken source >&2; exit 3"
    (build.WEB / "package.json").write_text(json.dumps(package))
    with pytest.raises(build.BuildError, match=r"npm run build failed[\s\S]*broken source"):
        build.build()
    assert not build.is_fresh()


def test_licences_come_from_the_lockfile(build: ModuleType):
    packages = {
        "": {"name": "page"},
        "node_modules/inside": {"version": "1.2.3", "license": "ISC"},
        "node_modules/tool": {"version": "9.9.9", "license": "MIT", "dev": True},
    }
    (build.WEB / "package-lock.json").write_text(json.dumps({"packages": packages}))
    (build.WEB / "node_modules" / "inside").mkdir(parents=True)
    (build.WEB / "node_modules" / "inside" / "LICENSE.md").write_text("Permission to use")
    text = build.collect_licences(build.WEB)
    assert "inside 1.2.3 (ISC)\n\nPermission to use" in text
    assert "tool" not in text
    del packages["node_modules/inside"]["license"]
    shutil.rmtree(build.WEB / "node_modules")
    (build.WEB / "package-lock.json").write_text(json.dumps({"packages": packages}))
    with pytest.raises(build.BuildError, match="inside names no licence"):
        build.collect_licences(build.WEB)


def test_the_wheel_carries_the_page_and_not_its_sources():
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"][
        "build"
    ]
    assert "/src/headwise/viewer/static" in targets["artifacts"]
    assert targets["hooks"]["custom"]["path"] == "build_web.py"
    assert "/src/headwise/viewer/web" in targets["targets"]["wheel"]["exclude"]
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"/src/headwise/viewer/static/", "node_modules/"} <= set(ignored)


def test_the_page_names_no_remote_address(static: Path):
    files = [path for path in static.rglob("*") if path.suffix in (".js", ".css", ".html")]
    assert files
    found = {
        (path.name, address)
        for path in files
        for address in ADDRESS.findall(path.read_bytes())
        if not NAMESPACE.match(address)
    }
    assert found == set()


def test_the_page_is_small(static: Path):
    """Chunks that are loaded on demand are those that index.html and app.js do not import
    statically.
    """
    sizes = {
        path.name: len(gzip.compress(path.read_bytes(), 9)) / 1000 for path in static.rglob("*.js")
    }
    assert sum(size for name, size in sizes.items() if name != "report.js") <= BUDGETS["app"]
    assert sum(sizes[name] for name in first_scripts(static)) <= BUDGETS["first screen"]
    assert (
        sum(len(gzip.compress(path.read_bytes(), 9)) / 1000 for path in static.rglob("*.css"))
        <= BUDGETS["styles"]
    )
    assert (static / "report.js").stat().st_size / 1000 <= BUDGETS["report"]


def first_scripts(static: Path) -> set[str]:
    """Names of app.js and of every chunk that it imports statically, directly or not."""
    names, pending = set[str](), ["app.js"]
    while pending:
        name = pending.pop()
        if name in names:
            continue
        names.add(name)
        path = next(static.rglob(name))
        imports = re.findall(
            r"""(?:\bfrom|\bimport)\s*["']([^"']+\.js)["']""", path.read_text(encoding="utf-8")
        )
        pending += [Path(imported).name for imported in imports]
    return names


# --- the logic of the page in node, without a browser ---


WEB = Path(headwise.viewer.__file__).with_name("web")


ESBUILD = WEB / "node_modules" / ".bin" / "esbuild"


def test_the_logic_of_the_page(tmp_path: Path):
    node = shutil.which("node")
    if node is None or not ESBUILD.exists():
        pytest.skip("needs node and the packages of the page: make web")
    source = Path(__file__).with_name("logic") / "logic.test.ts"
    bundle = tmp_path / "logic.test.mjs"
    options = ["--bundle", "--platform=node", "--format=esm", "--jsx=automatic"]
    options += ["--jsx-import-source=preact", f"--outfile={bundle}", "--log-level=warning"]
    environment = {**os.environ, "NODE_PATH": str(WEB / "node_modules")}
    subprocess.run([str(ESBUILD), str(source), *options], check=True, env=environment)
    found = subprocess.run([node, "--test", str(bundle)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
